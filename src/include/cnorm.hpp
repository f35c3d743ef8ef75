// cnorm for C++17: packed models, their streams, and the norms. Memory is owned, errors are exceptions. The manual is
// cnorm_model.h, of norms cnorm.h and cnorm_norms.h.
//
//     const auto model = cnorm::model::map("speaker.cnorm");
//     cnorm::stream stream(model);
//     stream.step(x, y);
//
//     cnorm::norm<float> call; // of which every member but x and y may be left as it is
//     call.x = x, call.y = y, call.gain = gain;
//     cnorm::layer_norm(call);
#ifndef CNORM_HPP
#define CNORM_HPP

#if __has_include("cnorm_model.h")
#include "cnorm_map.h"
#include "cnorm_model.h"
#include "cnorm_norms.h"
#else // the two files
#define CNORM_MAP
#include "cnorm.h"
#endif

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
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

// ---- norms ----------------------------------------------------------------------------------------------------------

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
} // namespace detail

template <class T> void layer_norm(const norm<T> &call)
{
    detail::run(cnorm_layer_norm, call, true, false, "layer_norm");
}
template <class T> void add_layer_norm(const norm<T> &call)
{
    detail::run(cnorm_add_layer_norm, call, true, true, "add_layer_norm");
}
template <class T> void rms_norm(const norm<T> &call) { detail::run(cnorm_rms_norm, call, false, false, "rms_norm"); }
template <class T> void layer_norm_backward(const norm_backward<T> &call)
{
    detail::run(cnorm_layer_norm_backward, call, true, "layer_norm_backward");
}
template <class T> void rms_norm_backward(const norm_backward<T> &call)
{
    detail::run(cnorm_rms_norm_backward, call, false, "rms_norm_backward");
}
template <class T> void group_norm(const volume_norm<T> &call)
{
    detail::run(cnorm_group_norm, call, detail::volume::group, "group_norm");
}
template <class T> void group_norm_backward(const volume_norm_backward<T> &call)
{
    detail::run(cnorm_group_norm_backward, call, detail::volume::group, "group_norm_backward");
}
template <class T> void batch_norm(const volume_norm<T> &call)
{
    detail::run(cnorm_batch_norm, call, detail::volume::batch, "batch_norm");
}
template <class T> void batch_norm_backward(const volume_norm_backward<T> &call)
{
    detail::run(cnorm_batch_norm_backward, call, detail::volume::batch, "batch_norm_backward");
}
template <class T> void batch_norm_inference(const volume_norm<T> &call)
{
    detail::run(cnorm_batch_norm_inference, call, detail::volume::inference, "batch_norm_inference");
}
template <class T> void batch_norm_inference_backward(const volume_norm_backward<T> &call)
{
    detail::run(cnorm_batch_norm_inference_backward, call, detail::volume::inference, "batch_norm_inference_backward");
}

} // namespace cnorm
#endif
