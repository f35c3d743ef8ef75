// GTCRN, suppression of noise in speech, as denoise.py: WAV in, WAV out, a hop of 16 ms at a time, without Python.
//
//     cnorm import gtcrn_simple.onnx gtcrn.cnorm
//     c++ -std=c++17 -O2 denoise.cpp cnorm.o -o denoise && ./denoise gtcrn.cnorm NOISY.wav DENOISED.wav [STATE [FRAMES]]
//
// With STATE the work goes on where that file was left, if there is one, and leaves it anew: the pieces of a recording
// become those of the whole. FRAMES gets every frame x and y, [hops, 2, 514], as the numbers of the network.
#include "cnorm.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <complex>
#include <cstdio>
#include <fstream>
#include <iterator>

namespace
{
constexpr int RATE = 16000, BLOCK = 512, HOP = 256, BINS = BLOCK / 2 + 1;
constexpr double PI = 3.14159265358979323846;
using spectrum = std::vector<std::complex<double>>;

// x [n] at a stride -> y [n], n a power of 2
void fft(const std::complex<double> *x, std::complex<double> *y, int n, int stride = 1)
{
    static const spectrum turns = [] {
        spectrum all(BLOCK);
        for (int k = 0; k < BLOCK; ++k) all[k] = std::polar(1.0, -2 * PI * k / BLOCK);
        return all;
    }();
    if (n == 2) {
        y[0] = x[0] + x[stride];
        y[1] = x[0] - x[stride];
        return;
    }
    fft(x, y, n / 2, 2 * stride);
    fft(x + stride, y + n / 2, n / 2, 2 * stride);
    for (int k = 0; k < n / 2; ++k) {
        const auto even = y[k], part = y[k + n / 2], turn = turns[k * stride];
        const std::complex<double> odd(part.real() * turn.real() - part.imag() * turn.imag(),
                                       part.real() * turn.imag() + part.imag() * turn.real()); // * tests for NaN
        y[k] = even + odd;
        y[k + n / 2] = even - odd;
    }
}

// The network between overlapping blocks of 512 samples.
class denoiser
{
  public:
    explicit denoiser(const cnorm::model &model) : stream_(model), time_(BLOCK), bins_(BLOCK)
    {
        if (model.inputs() != 2 * BINS || model.outputs() != 2 * BINS)
            throw std::runtime_error("the model must have 514 inputs and outputs: 257 frequencies, real and imaginary");
        for (int i = 0; i < BLOCK; ++i) window_[i] = static_cast<float>(std::sin(PI * i / BLOCK)); // sqrt(Hann)
    }
    float x[2 * BINS], y[2 * BINS]; // [257, 2], of the last hop

    // the next 256 samples without noise, for the next 256 with it; 256 samples late
    void hop(const float *in, float *out)
    {
        std::copy(block_ + HOP, block_ + BLOCK, block_);
        std::copy(in, in + HOP, block_ + BLOCK - HOP);
        for (int i = 0; i < BLOCK; ++i) time_[i] = block_[i] * window_[i];
        fft(time_.data(), bins_.data(), BLOCK);
        for (int k = 0; k < BINS; ++k) {
            x[2 * k] = static_cast<float>(bins_[k].real());
            x[2 * k + 1] = static_cast<float>(bins_[k].imag());
        }
        stream_.step(x, y);
        for (int k = 0; k < BINS; ++k) { // conjugated, so that the same transform is the inverse
            const bool real = k == 0 || k == BLOCK / 2;
            bins_[k] = {y[2 * k], real ? 0.0 : -y[2 * k + 1]};
            if (!real) bins_[BLOCK - k] = std::conj(bins_[k]);
        }
        fft(bins_.data(), time_.data(), BLOCK);
        std::copy(sum_ + HOP, sum_ + BLOCK, sum_);
        std::fill(sum_ + BLOCK - HOP, sum_ + BLOCK, 0.0f);
        for (int i = 0; i < BLOCK; ++i) sum_[i] += static_cast<float>(time_[i].real() / BLOCK) * window_[i];
        std::copy(sum_, sum_ + HOP, out);
    }
    // the bytes of Python's Stream.save, and the two blocks
    std::string save() const
    {
        const auto state = stream_.save();
        std::string bytes(state.begin(), state.end());
        for (const float *part : {block_, sum_}) bytes.append(reinterpret_cast<const char *>(part), sizeof block_);
        return bytes;
    }
    void restore(const std::string &bytes)
    {
        if (bytes.size() < sizeof block_ + sizeof sum_) throw std::runtime_error("the state is too short");
        const auto size = bytes.size() - sizeof block_ - sizeof sum_;
        stream_.restore(bytes.data(), size); // or an error, if it is not this model's
        std::memcpy(block_, bytes.data() + size, sizeof block_);
        std::memcpy(sum_, bytes.data() + size + sizeof block_, sizeof sum_);
    }

  private:
    cnorm::stream stream_;
    spectrum time_, bins_;
    float window_[BLOCK], block_[BLOCK] = {}, sum_[BLOCK] = {};
};

std::string contents(const std::string &path)
{
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + ": it can't be read");
    return {std::istreambuf_iterator<char>(file), {}};
}

unsigned number(const std::string &bytes, std::size_t at, int size)
{
    unsigned value = 0;
    for (int i = size - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
    return value;
}

// the first channel, in -1 to 1
std::vector<float> read_wav(const std::string &path)
{
    const auto bytes = contents(path);
    if (bytes.size() < 12 || bytes.compare(0, 4, "RIFF") || bytes.compare(8, 4, "WAVE"))
        throw std::runtime_error(path + ": no WAV file");
    unsigned channels = 0;
    for (std::size_t at = 12; at + 8 <= bytes.size();) {
        const std::size_t size = number(bytes, at + 4, 4), start = at + 8;
        if (!bytes.compare(at, 4, "fmt ")) {
            if (start + 16 > bytes.size()) break;
            channels = number(bytes, start + 2, 2);
            if (number(bytes, start + 4, 4) != RATE || number(bytes, start + 14, 2) != 16 || channels == 0)
                throw std::runtime_error(path + ": 16000 Hz and 16 bits are wanted");
        } else if (!bytes.compare(at, 4, "data") && channels) {
            std::vector<float> samples(std::min(size, bytes.size() - start) / (2 * channels));
            for (std::size_t i = 0; i < samples.size(); ++i)
                samples[i] = static_cast<std::int16_t>(number(bytes, start + 2 * channels * i, 2)) / 32768.0f;
            return samples;
        }
        at = start + size + size % 2;
    }
    throw std::runtime_error(path + ": it has no samples");
}

void write_wav(const std::string &path, const std::vector<float> &samples)
{
    std::string bytes = "RIFF";
    const auto add = [&](std::size_t value, int size) {
        for (; size > 0; --size, value >>= 8) bytes += static_cast<char>(value & 255);
    };
    add(36 + 2 * samples.size(), 4);
    bytes += "WAVEfmt ";
    for (const int each : {16, 1 | 1 << 16, RATE, 2 * RATE, 2 | 16 << 16}) add(static_cast<std::size_t>(each), 4);
    bytes += "data";
    add(2 * samples.size(), 4);
    for (const float sample : samples)
        add(static_cast<std::uint16_t>(static_cast<std::int16_t>(std::clamp(sample, -1.0f, 1.0f) * 32767)), 2);
    std::ofstream(path, std::ios::binary) << bytes;
}
} // namespace

int main(int argc, char **argv)
try {
    if (argc < 4 || argc > 6) throw std::runtime_error("usage: denoise MODEL.cnorm IN.wav OUT.wav [STATE [FRAMES]]");
    denoiser network(cnorm::model::map(argv[1]));
    const auto noisy = read_wav(argv[2]);
    const bool goes_on = argc > 4 && std::ifstream(argv[4]).good();
    if (goes_on) network.restore(contents(argv[4]));
    std::vector<float> clean(noisy.size() / HOP * HOP), frames;
    std::vector<double> times;
    for (std::size_t at = 0; at < clean.size(); at += HOP) {
        const auto start = std::chrono::steady_clock::now();
        network.hop(&noisy[at], &clean[at]);
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
        for (const float *frame : {network.x, network.y}) frames.insert(frames.end(), frame, frame + 2 * BINS);
    }
    if (!goes_on && !clean.empty()) clean.erase(clean.begin(), clean.begin() + BLOCK - HOP); // the delay
    write_wav(argv[3], clean);
    if (argc > 4) std::ofstream(argv[4], std::ios::binary) << network.save();
    if (argc > 5)
        std::ofstream(argv[5], std::ios::binary)
            .write(reinterpret_cast<const char *>(frames.data()), static_cast<std::streamsize>(4 * frames.size()));
    std::sort(times.begin(), times.end());
    if (!times.empty())
        std::printf("%zu hops of 16 ms: median %.0f us, 99.9 %% below %.0f us\n", times.size(), times[times.size() / 2],
                    times[times.size() * 999 / 1000]);
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
}
