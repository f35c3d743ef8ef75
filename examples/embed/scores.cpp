// Stream frames, float32 numbers on standard input, through a packed model; print its scores and the hash of their bits.
//
//     c++ -std=c++17 -O2 scores.cpp cnorm.o -o scores && ./scores demo.cnorm < frames.f32
#include "cnorm.hpp"

#include <cinttypes>
#include <cstdio>
#include <cstring>

int main(int argc, char **argv)
try {
    if (argc != 2) throw std::runtime_error("usage: scores MODEL.cnorm < FRAMES");
    const auto model = cnorm::model::map(argv[1]);
    cnorm::stream stream(model);
    std::vector<float> x(model.inputs()), y(model.outputs());
    std::uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
    while (std::fread(x.data(), sizeof(float), x.size(), stdin) == x.size()) {
        stream.step(x.data(), y.data());
        for (std::size_t i = 0; i < y.size(); ++i) {
            std::uint32_t bits;
            std::memcpy(&bits, &y[i], sizeof bits);
            for (int k = 0; k < 32; k += 8) hash = (hash ^ (bits >> k & 255)) * 0x100000001b3u;
            std::printf("%.4f%c", static_cast<double>(y[i]), i + 1 == y.size() ? '\n' : ' ');
        }
    }
    std::printf("hash %016" PRIx64 "\n", hash);
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
}
