/* CRC-32 of zlib and PNG: polynomial 0x04C11DB7 reflected, initial value and final XOR 0xFFFFFFFF. */
#ifndef CNORM_CRC32_H
#define CNORM_CRC32_H

#include <stddef.h>
#include <stdint.h>

static inline uint32_t crc32_of(const void *bytes, ptrdiff_t count)
{
    static const uint32_t table[16] = {/* of the remainders of four bits */
                                       0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                       0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                       0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    const unsigned char *from = bytes;
    uint32_t crc = 0xffffffffu, later[8][16]; /* remainders of four bits with k times four bits behind them */
    for (int n = 0; n < 16; ++n) later[0][n] = table[n];
    for (int k = 1; k < 8; ++k)
        for (int n = 0; n < 16; ++n) later[k][n] = later[k - 1][n] >> 4 ^ table[later[k - 1][n] & 15];
    for (; count >= 4; count -= 4, from += 4) {
        crc ^= from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
        uint32_t next = 0;
        for (int k = 0; k < 8; ++k) next ^= later[7 - k][crc >> 4 * k & 15];
        crc = next;
    }
    for (; count > 0; --count) {
        crc ^= *from++;
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
    return ~crc;
}

#endif
