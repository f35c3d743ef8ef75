// cnorm for C++17: the norms of spans. Sizes are checked, scratch is allocated, errors are exceptions. The manual is
// cnorm.h and cnorm_norms.h.
//
//     cnorm::norm<float> call; // of which every member but x and y may be left as it is
//     call.x = x, call.y = y, call.gain = gain;
//     cnorm::layer_norm(call);
#ifndef CNORM_NORMS_HPP
#define CNORM_NORMS_HPP

#include "cnorm.hpp"

#if __has_include("cnorm_norms.h")
#include "cnorm_norms.h"
#endif

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <type_traits>

namespace cnorm
{

// Contiguous elements that something else owns, as std::span of C++20: a pointer and a count, an array or a container
template <class T> class span
{
  public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <class C, class = std::enable_if_t<std::is_convertible_v<decltype(std::data(std::declval<C &>())), T *>>>
    constexpr span(C &&all) noexcept : data_(std::data(all)), size_(std::size(all))
    {
    }
    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }

  private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

// The half types, which C++17 lacks
struct float16 {
    std::uint16_t bits;
};
struct bfloat16 {
    std::uint16_t bits;
};

template <class T> struct element {
    static_assert(sizeof(T) == 2, "float, double, cnorm::float16 or cnorm::bfloat16");
    static constexpr cnorm_dtype dtype = std::is_same_v<T, bfloat16> ? CNORM_BF16 : CNORM_F16;
    using compute = float;
};
template <> struct element<float> {
    static constexpr cnorm_dtype dtype = CNORM_F32;
    using compute = float;
};
template <> struct element<double> {
    static constexpr cnorm_dtype dtype = CNORM_F64;
    using compute = double;
};
template <class T> using compute = typename element<T>::compute; // of gains, biases, statistics and their gradients

// The calls. An empty span is the NULL of C. Rows are contiguous, and their number is that of x.
template <class T> struct norm {
    std::size_t n = 0; // elements of a row; 0: as many as gain has, or x if there is none
    span<const T> x, residual;
    span<const compute<T>> gain, bias;
    double eps = 1e-5;
    span<T> y, sum;
    span<compute<T>> stats;
};
template <class T> struct norm_backward {
    std::size_t n = 0; // as above
    span<const T> dy, x;
    span<const compute<T>> gain, stats;
    span<T> dx;
    span<compute<T>> dgain, dbias;
};
template <class T> struct volume_norm {
    std::size_t samples = 0, channels = 0, groups = 1; // space is what remains of x
    span<const T> x;
    span<const compute<T>> gain, bias, mean, var;
    double eps = 1e-5;
    span<T> y;
    span<compute<T>> stats;
    span<double> moments;
};
template <class T> struct volume_norm_backward {
    std::size_t samples = 0, channels = 0, groups = 1;
    span<const T> dy, x;
    span<const compute<T>> gain, stats, mean, var;
    double eps = 1e-5;
    span<T> dx;
    span<compute<T>> dgain, dbias;
};

template <class T> struct weight {
    std::size_t n = 0; // elements of a row of w
    span<const T> dv, w, gain;
    span<T> out, dgain;
};
template <class T> struct divisive {
    std::size_t n = 0;                                              // as of norm
    std::ptrdiff_t mean_radius = PTRDIFF_MAX, radius = PTRDIFF_MAX; // of the two fields: the whole row
    span<const T> dy, x, gain, bias;
    double sigma = 1;
    span<T> out, dgain, dbias;
    double *dsigma = nullptr;
};

namespace detail
{
inline std::ptrdiff_t size(std::size_t n) { return static_cast<std::ptrdiff_t>(n); }

// the data of a span that has as many elements as it should; an empty one, where that is allowed, is NULL
template <class T> T *data(span<T> s, std::size_t wanted, const char *what, bool may_be_empty = false)
{
    if (s.size() == 0 && may_be_empty) return nullptr;
    if (s.size() != wanted) throw error(CNORM_ERROR_SIZE, what);
    return s.data();
}

template <class Call> std::size_t row_of(const Call &call, const char *what)
{
    const std::size_t n = call.n ? call.n : call.gain.size() ? call.gain.size() : call.x.size();
    if (n == 0 || call.x.size() % n) throw error(CNORM_ERROR_SIZE, what);
    return n;
}

// sets the sizes of a volume and returns its elements in a channel of a sample
template <class Call, class C> std::size_t shape(const Call &call, C &c, const char *what)
{
    const std::size_t channels = call.samples * call.channels;
    if (channels == 0 || call.x.size() % channels) throw error(CNORM_ERROR_SIZE, what);
    c.samples = size(call.samples), c.channels = size(call.channels), c.groups = size(call.groups);
    c.space = size(call.x.size() / channels);
    return call.x.size() / channels;
}

template <class T> using norm_entry = cnorm_status (*)(cnorm_dtype, const T *);

template <class T>
void run(norm_entry<cnorm_norm> entry, const norm<T> &call, bool with_bias, bool with_sum, const char *what)
{
    const std::size_t n = row_of(call, what), all = call.x.size();
    cnorm_norm c{};
    c.rows = size(all / n), c.n = size(n), c.eps = call.eps;
    c.x = call.x.data(), c.y = data(call.y, all, what);
    c.gain = data(call.gain, n, what, true);
    if (with_bias) c.bias = data(call.bias, n, what, true);
    if (with_sum) c.residual = data(call.residual, all, what), c.sum = data(call.sum, all, what);
    c.stats = data(call.stats, 3 * (all / n), what, true);
    check(entry(element<T>::dtype, &c), what);
}

template <class T>
void run(norm_entry<cnorm_norm_backward> entry, const norm_backward<T> &call, bool with_bias, const char *what)
{
    const std::size_t n = row_of(call, what), all = call.x.size();
    cnorm_norm_backward c{};
    c.rows = size(all / n), c.n = size(n);
    c.dy = data(call.dy, all, what), c.x = call.x.data(), c.gain = data(call.gain, n, what, true);
    c.stats = data(call.stats, 3 * (all / n), what), c.dx = data(call.dx, all, what);
    c.dgain = data(call.dgain, n, what);
    if (with_bias) c.dbias = data(call.dbias, n, what);
    const auto partials = allocate(cnorm_backward_partials(element<T>::dtype, c.rows, c.n));
    c.partials = partials.get();
    check(entry(element<T>::dtype, &c), what);
}

enum class volume { group, batch, inference };

template <class T>
void run(norm_entry<cnorm_volume_norm> entry, const volume_norm<T> &call, volume kind, const char *what)
{
    cnorm_volume_norm c{};
    shape(call, c, what);
    const std::size_t channels = call.channels;
    c.x = call.x.data(), c.y = data(call.y, call.x.size(), what), c.eps = call.eps;
    c.gain = data(call.gain, channels, what, true), c.bias = data(call.bias, channels, what, true);
    if (kind == volume::inference) c.mean = data(call.mean, channels, what), c.var = data(call.var, channels, what);
    else c.stats = data(call.stats, 3 * (kind == volume::group ? call.samples * call.groups : channels), what, true);
    if (kind == volume::batch) c.moments = data(call.moments, 2 * channels, what, true);
    const auto scratch = allocate(
        kind == volume::group ? 0 : cnorm_batch_norm_scratch(element<T>::dtype, c.samples, c.channels, c.space));
    c.scratch = scratch.get();
    check(entry(element<T>::dtype, &c), what);
}

template <class T>
void run(norm_entry<cnorm_volume_norm_backward> entry, const volume_norm_backward<T> &call, volume kind,
         const char *what)
{
    cnorm_volume_norm_backward c{};
    shape(call, c, what);
    const std::size_t channels = call.channels, all = call.x.size();
    c.dy = data(call.dy, all, what), c.x = call.x.data(), c.dx = data(call.dx, all, what), c.eps = call.eps;
    c.gain = data(call.gain, channels, what, true);
    if (kind == volume::inference) c.mean = data(call.mean, channels, what), c.var = data(call.var, channels, what);
    else c.stats = data(call.stats, 3 * (kind == volume::group ? call.samples * call.groups : channels), what);
    c.dgain = data(call.dgain, channels, what), c.dbias = data(call.dbias, channels, what);
    const auto dtype = element<T>::dtype;
    const bool group = kind == volume::group;
    const auto scratch = allocate(group ? cnorm_backward_partials(dtype, c.samples, c.channels)
                                        : cnorm_batch_norm_scratch(dtype, c.samples, c.channels, c.space));
    c.scratch = scratch.get();
    check(entry(dtype, &c), what);
}

template <class T> void run(norm_entry<cnorm_weight> entry, const weight<T> &call, bool backward, const char *what)
{
    if (call.n == 0 || call.w.size() % call.n) throw error(CNORM_ERROR_SIZE, what);
    const std::size_t all = call.w.size(), rows = all / call.n;
    cnorm_weight c{};
    c.rows = size(rows), c.n = size(call.n), c.w = call.w.data(), c.gain = data(call.gain, rows, what, true);
    c.out = data(call.out, all, what);
    if (backward) c.dv = data(call.dv, all, what), c.dgain = data(call.dgain, rows, what);
    check(entry(element<T>::dtype, &c), what);
}

template <class T> void run(norm_entry<cnorm_divisive> entry, const divisive<T> &call, bool backward, const char *what)
{
    const std::size_t n = row_of(call, what), all = call.x.size();
    cnorm_divisive c{};
    c.rows = size(all / n), c.n = size(n), c.mean_radius = call.mean_radius, c.radius = call.radius;
    c.x = call.x.data(), c.gain = data(call.gain, n, what, true), c.sigma = call.sigma;
    c.out = data(call.out, all, what);
    if (!backward) c.bias = data(call.bias, n, what, true);
    else c.dy = data(call.dy, all, what), c.dgain = data(call.dgain, n, what), c.dbias = data(call.dbias, n, what);
    c.dsigma = call.dsigma;
    const auto scratch = allocate(cnorm_divisive_norm_scratch(c.n));
    c.scratch = scratch.get();
    check(entry(element<T>::dtype, &c), what);
}
} // namespace detail

#define CNORM_FUNCTION(name, call_type, ...)                                                                           \
    template <class T> void name(const call_type<T> &call) { detail::run(cnorm_##name, call, __VA_ARGS__, #name); }
CNORM_FUNCTION(layer_norm, norm, true, false) // with a bias, with a sum
CNORM_FUNCTION(add_layer_norm, norm, true, true)
CNORM_FUNCTION(rms_norm, norm, false, false)
CNORM_FUNCTION(layer_norm_backward, norm_backward, true)
CNORM_FUNCTION(rms_norm_backward, norm_backward, false)
CNORM_FUNCTION(group_norm, volume_norm, detail::volume::group)
CNORM_FUNCTION(group_norm_backward, volume_norm_backward, detail::volume::group)
CNORM_FUNCTION(batch_norm, volume_norm, detail::volume::batch)
CNORM_FUNCTION(batch_norm_backward, volume_norm_backward, detail::volume::batch)
CNORM_FUNCTION(batch_norm_inference, volume_norm, detail::volume::inference)
CNORM_FUNCTION(batch_norm_inference_backward, volume_norm_backward, detail::volume::inference)
CNORM_FUNCTION(weight_norm, weight, false) // whether it is the backward pass
CNORM_FUNCTION(weight_norm_backward, weight, true)
CNORM_FUNCTION(divisive_norm, divisive, false)
CNORM_FUNCTION(divisive_norm_backward, divisive, true)
#undef CNORM_FUNCTION

} // namespace cnorm
#endif
