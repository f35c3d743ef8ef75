/* cnorm_map: the bytes of a file, mapped into memory, for cnorm_model_open. The only part of cnorm that makes system
 * calls, and so a header of its own: the library does not contain it.
 *
 * All processes that map a file share its memory. A file that may change while it is mapped must be replaced, as
 * Model.save_packed does, not written over: a mapped file that becomes shorter ends the process (SIGBUS).
 */
#ifndef CNORM_MAP_H
#define CNORM_MAP_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#if !defined(WIN32_LEAN_AND_MEAN)
#define WIN32_LEAN_AND_MEAN
#endif
#if !defined(NOMINMAX)
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

/* The whole of a regular file, for reading, and its size in bytes; NULL and 0 if it can't be opened, with errno (EISDIR
 * for a folder, EINVAL for a device, a pipe or an empty file) or GetLastError. cnorm_unmap gives it back. */
static inline const void *cnorm_map(const char *path, ptrdiff_t *bytes)
{
    *bytes = 0;
#if defined(_WIN32)
    const void *memory = NULL;
    LARGE_INTEGER size;
    const HANDLE file = CreateFileA(path, GENERIC_READ, FILE_SHARE_READ, NULL, OPEN_EXISTING, 0, NULL);
    if (file == INVALID_HANDLE_VALUE) return NULL;
    const HANDLE mapping = GetFileSizeEx(file, &size) && size.QuadPart > 0 && size.QuadPart <= PTRDIFF_MAX
                               ? CreateFileMappingA(file, NULL, PAGE_READONLY, 0, 0, NULL)
                               : NULL;
    if (mapping) {
        memory = MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
        CloseHandle(mapping);
        *bytes = (ptrdiff_t)size.QuadPart;
    }
    CloseHandle(file);
    return memory;
#else
    void *memory = MAP_FAILED;
    struct stat status;
    int flags = O_RDONLY | O_NONBLOCK; /* opening a pipe must not wait for a writer */
#if defined(O_CLOEXEC) /* POSIX 2008 */
    flags |= O_CLOEXEC;
#endif
    const int file = open(path, flags);
    if (file < 0) return NULL;
    int error = 0;
    if (fstat(file, &status) != 0) error = errno;
    else if (S_ISDIR(status.st_mode)) error = EISDIR;
    else if (!S_ISREG(status.st_mode) || status.st_size <= 0 || status.st_size > PTRDIFF_MAX) error = EINVAL;
    else if ((memory = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0)) == MAP_FAILED) error = errno;
    else *bytes = (ptrdiff_t)status.st_size;
    close(file);
    if (error) errno = error; /* not that of close */
    return error ? NULL : memory;
#endif
}

static inline void cnorm_unmap(const void *memory, ptrdiff_t bytes)
{
#if defined(_WIN32)
    (void)bytes;
    UnmapViewOfFile(memory);
#else
    if (memory) munmap((void *)(size_t)memory, (size_t)bytes);
#endif
}

#endif
