// cnorm for C++17: packed models and their streams. Memory is owned, errors are exceptions. The manual is
// cnorm_model.h. cnorm_norms.hpp has the norms.
//
//     const auto model = cnorm::model::map("speaker.cnorm");
//     cnorm::stream stream(model);
//     stream.step(x, y);
#ifndef CNORM_HPP
#define CNORM_HPP

#if __has_include("cnorm_model.h")
#include "cnorm_map.h"
#include "cnorm_model.h"
#else // the two files
#define CNORM_MAP
#include "cnorm.h"
#endif

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace cnorm
{

class error : public std::runtime_error
{
  public:
    error(cnorm_status code, const std::string &what)
        : std::runtime_error(what + ": " + cnorm_strerror(code)), status(code)
    {
    }
    cnorm_status status;
};

inline void check(cnorm_status status, const std::string &what)
{
    if (status != CNORM_OK) throw error(status, what);
}

namespace detail
{
struct free_aligned {
    void operator()(void *p) const { ::operator delete(p, std::align_val_t(CNORM_ALIGN)); }
};
using memory = std::unique_ptr<void, free_aligned>;
// ", layer 1, weight_x", for the message of an error; empty if it is none's in particular
inline std::string place(const cnorm_fault &fault)
{
    std::string text;
    if (fault.network > 0) text += ", network " + std::to_string(fault.network);
    if (fault.layer >= 0) text += ", layer " + std::to_string(fault.layer);
    return fault.field ? text + ", " + fault.field : text;
}
// std::bad_alloc if there is not so much memory
inline memory allocate(std::ptrdiff_t bytes)
{
    return memory(::operator new(bytes > 0 ? static_cast<std::size_t>(bytes) : 1, std::align_val_t(CNORM_ALIGN)));
}
} // namespace detail

// An open model: immutable, cheap to copy, shared by streams and threads.
class model
{
  public:
    model(const model &) = default; // no move operations: a model is never empty
    model &operator=(const model &) = default;
    // a file, mapped into memory; it must be replaced, not written over, while it is in use. std::system_error if the
    // file can't be read, cnorm::error if it is not a packed model
    [[nodiscard]] static model map(const std::string &path)
    {
        std::ptrdiff_t bytes = 0;
        const void *file = cnorm_map(path.c_str(), &bytes);
#if defined(_WIN32)
        if (!file) throw std::system_error(static_cast<int>(GetLastError()), std::system_category(), path);
#else
        if (!file) throw std::system_error(errno, std::generic_category(), path);
#endif
        std::shared_ptr<const void> owner(file, [bytes](const void *p) { cnorm_unmap(p, bytes); });
        return model(std::move(owner), bytes, path);
    }
    // any bytes, such as a resource of the program; they are copied
    [[nodiscard]] static model copy(const void *file, std::ptrdiff_t bytes)
    {
        std::shared_ptr<void> owner(detail::allocate(bytes));
        if (bytes > 0) std::memcpy(owner.get(), file, static_cast<std::size_t>(bytes));
        return model(std::move(owner), bytes, "model");
    }
    // bytes aligned to CNORM_ALIGN that outlive the model, such as the array of `cnorm pack --c-array`; not copied
    [[nodiscard]] static model of(const void *file, std::ptrdiff_t bytes)
    {
        return model(std::shared_ptr<const void>(file, [](const void *) {}), bytes, "model");
    }
    std::size_t inputs() const noexcept { return static_cast<std::size_t>(open_->model.inputs); }
    std::size_t outputs() const noexcept { return static_cast<std::size_t>(open_->model.outputs); }
    [[nodiscard]] std::vector<unsigned char> identity() const
    {
        return {get()->identity, get()->identity + CNORM_IDENTITY};
    }
    // a whole sequence x [steps, inputs] -> y [steps, outputs]
    void run(std::size_t steps, const float *x, float *y) const
    {
        const auto floats = cnorm_model_floats(get(), static_cast<std::ptrdiff_t>(steps));
        const auto memory = detail::allocate(floats * static_cast<std::ptrdiff_t>(sizeof(float)));
        const auto at = static_cast<float *>(memory.get());
        check(cnorm_model_run(get(), static_cast<std::ptrdiff_t>(steps), x, y, at), "run");
    }
    const cnorm_model *get() const noexcept { return &open_->model; }

  private:
    struct open {
        std::shared_ptr<const void> file;
        detail::memory memory;
        cnorm_model model;
    };
    model(std::shared_ptr<const void> file, std::ptrdiff_t bytes, const std::string &name)
        : open_(std::make_shared<open>())
    {
        const auto needed = cnorm_model_memory(file.get(), bytes);
        open_->memory = detail::allocate(needed);
        cnorm_fault fault{};
        const auto status = cnorm_model_open(file.get(), bytes, open_->memory.get(), needed, &open_->model, &fault);
        check(status, status == CNORM_OK ? name : name + detail::place(fault));
        open_->file = std::move(file);
    }
    std::shared_ptr<open> open_;
};

// One sequence, step by step; movable, used by one thread at a time. It keeps its model alive. A stream that was moved
// from throws cnorm::error (CNORM_ERROR_NULL) when it is used.
class stream
{
  public:
    explicit stream(model of, int rows = 1) : model_(std::move(of))
    {
        const auto floats = cnorm_stream_floats(model_.get(), rows);
        memory_ = detail::allocate(floats * static_cast<std::ptrdiff_t>(sizeof(float)));
        check(cnorm_stream_start(&stream_, model_.get(), static_cast<float *>(memory_.get()), rows), "stream");
    }
    stream(stream &&other) noexcept
        : model_(other.model_), memory_(std::move(other.memory_)), stream_(std::exchange(other.stream_, {}))
    {
    }
    stream &operator=(stream &&other) noexcept
    {
        model_ = other.model_;
        memory_ = std::move(other.memory_);
        stream_ = std::exchange(other.stream_, {});
        return *this;
    }
    // x [steps, inputs] -> y [steps, outputs]
    void step(const float *x, float *y, std::size_t steps = 1)
    {
        check(cnorm_stream_run(&stream_, static_cast<std::ptrdiff_t>(steps), x, y), "step");
    }
    void reset() noexcept { cnorm_stream_reset(&stream_); }
    // whether no value of the state is a NaN or an infinity
    bool finite() const noexcept { return cnorm_stream_finite(&stream_) != 0; }
    std::uint64_t frames() const noexcept { return stream_.frames; }
    // the bytes of Python's Stream.save and Model.restore
    [[nodiscard]] std::vector<unsigned char> save() const
    {
        std::vector<unsigned char> bytes(static_cast<std::size_t>(cnorm_stream_saved_bytes(model_.get())));
        check(cnorm_stream_save(&stream_, bytes.data()), "save");
        return bytes;
    }
    void restore(const void *bytes, std::size_t count)
    {
        check(cnorm_stream_restore(&stream_, bytes, static_cast<std::ptrdiff_t>(count)), "restore");
    }

  private:
    model model_;
    detail::memory memory_;
    cnorm_stream stream_{};
};

} // namespace cnorm
#endif
