/*
 * tfx.hpp: texts to vectors in C++17, from a bundle that `tfx export` made, through any onnxruntime >= 1.20.
 *
 *     tfx::Encoder encoder("bundle");
 *     std::vector<std::vector<float>> vectors = encoder.embed({"a text", "another"});
 *
 * A layer over tfx.h, whose comments say more. Every failure is a tfx::Error; one encoder may be used by several
 * threads at once.
 */
#ifndef TFX_HPP
#define TFX_HPP

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "tfx.h"

namespace tfx {

/* What went wrong, in one line that names the thing, what was found and what was wanted. */
class Error : public std::runtime_error {
public:
    Error(tfx_status status, const std::string &message) : std::runtime_error(message), status_(status) {}

    /* TFX_INPUT: bad use, bad input, or a damaged bundle. TFX_MACHINE: onnxruntime is missing or too old, no memory. */
    tfx_status status() const noexcept {
        return status_;
    }

private:
    tfx_status status_;
};

/* How a bundle is loaded. */
struct Options {
    std::filesystem::path library; /* of onnxruntime; empty: $TFX_ONNXRUNTIME, else the loader's own search */
    int threads = 0;               /* inside an operator; 0: what the bundle was tuned to, else onnxruntime's choice */
};

/* The tokens of one text, special tokens among them, not padded. */
struct Tokens {
    std::vector<std::int64_t> ids;
    std::vector<std::int64_t> types; /* segment ids, as many */
    std::size_t dropped = 0;         /* tokens that the longest the model takes left out */
};

/* The tfx_dtype of a type of C++. */
template <class T> constexpr tfx_dtype dtype_of() {
    if constexpr (std::is_same_v<T, bool>) {
        return TFX_BOOL;
    } else if constexpr (std::is_same_v<T, float>) {
        return TFX_FLOAT32;
    } else if constexpr (std::is_same_v<T, double>) {
        return TFX_FLOAT64;
    } else {
        static_assert(std::is_integral_v<T>, "a tensor holds numbers or bool");
        constexpr bool negative = std::is_signed_v<T>;
        if constexpr (sizeof(T) == 1) {
            return negative ? TFX_INT8 : TFX_UINT8;
        } else if constexpr (sizeof(T) == 2) {
            return negative ? TFX_INT16 : TFX_UINT16;
        } else if constexpr (sizeof(T) == 4) {
            return negative ? TFX_INT32 : TFX_UINT32;
        } else {
            return negative ? TFX_INT64 : TFX_UINT64;
        }
    }
}

/*
 * A named dense array, row by row. Its values are shared by copies and never change; a tensor that was moved from is
 * empty, of no dimension and no value.
 */
class Tensor {
public:
    Tensor() = default;

    /*
     * Throw Error (TFX_INPUT) where the shape has a negative size, more than TFX_MAX_RANK sizes, or another number of
     * values.
     */
    template <class T> Tensor(std::string name, const std::vector<std::int64_t> &shape, const std::vector<T> &values) {
        struct Storage {
            std::string name;
            std::unique_ptr<T[]> data; /* std::vector<bool> has no array of bool inside */
        };
        const std::size_t size = checked_size(name, shape, values.size());
        auto storage = std::make_shared<Storage>(Storage{std::move(name), std::make_unique<T[]>(size)});
        for (std::size_t i = 0; i < size; i++) {
            storage->data[i] = values[i];
        }
        view_.name = storage->name.c_str();
        view_.dtype = dtype_of<T>();
        view_.rank = shape.size();
        for (std::size_t i = 0; i < shape.size(); i++) {
            view_.shape[i] = shape[i];
        }
        view_.data = storage->data.get();
        owner_ = std::move(storage);
    }

    /* A tensor of C that `owner` keeps alive. */
    Tensor(const tfx_tensor &view, std::shared_ptr<void> owner) : view_(view), owner_(std::move(owner)) {}

    Tensor(const Tensor &) = default;
    Tensor &operator=(const Tensor &) = default;
    Tensor(Tensor &&other) noexcept : view_(std::exchange(other.view_, {})), owner_(std::move(other.owner_)) {}
    Tensor &operator=(Tensor &&other) noexcept {
        view_ = std::exchange(other.view_, {});
        owner_ = std::move(other.owner_);
        return *this;
    }
    ~Tensor() = default;

    std::string name() const {
        return view_.name == nullptr ? "" : view_.name;
    }
    tfx_dtype dtype() const noexcept {
        return view_.dtype;
    }
    std::vector<std::int64_t> shape() const {
        return {view_.shape, view_.shape + view_.rank};
    }

    /* Number of values. */
    std::size_t size() const {
        return view_.data == nullptr ? 0 : tfx_tensor_size(&view_);
    }

    /* The first value; throws Error (TFX_INPUT) where values are of another type. */
    template <class T> const T *data() const {
        if (view_.data != nullptr && view_.dtype != dtype_of<T>()) {
            throw Error(TFX_INPUT, name() + ": found " + tfx_dtype_name(view_.dtype) + ", wanted " +
                                       tfx_dtype_name(dtype_of<T>()));
        }
        return static_cast<const T *>(view_.data);
    }

    /* All values, in a vector of their own; throws as data() does. */
    template <class T> std::vector<T> values() const {
        const T *first = data<T>();
        return first == nullptr ? std::vector<T>() : std::vector<T>(first, first + size());
    }

    /* As C sees it; valid as long as a copy of this tensor is. */
    const tfx_tensor &view() const noexcept {
        return view_;
    }

private:
    static std::size_t checked_size(const std::string &name, const std::vector<std::int64_t> &shape,
                                    std::size_t found) {
        std::size_t size = 1;
        bool valid = shape.size() <= TFX_MAX_RANK;
        for (const std::int64_t axis : shape) {
            /* A product larger than what was given cannot be right, and would not have to fit. */
            valid = valid && axis >= 0 && (axis == 0 || size <= found / static_cast<std::uint64_t>(axis));
            size = valid ? size * static_cast<std::size_t>(axis) : 0;
        }
        if (!valid || size != found) {
            throw Error(TFX_INPUT, name + ": found " + std::to_string(found) + " values, wanted those of the shape");
        }
        return size;
    }

    tfx_tensor view_ = {};
    std::shared_ptr<void> owner_;
};

/* What the self-check found. */
class Report {
public:
    explicit Report(tfx_status status, const tfx_report &report) : status_(status), report_(report) {}

    bool passed() const noexcept {
        return report_.passed;
    }

    /* TFX_OK: all passed. TFX_CHECK: a stage failed. Else as Error's. */
    tfx_status status() const noexcept {
        return status_;
    }

    /* The first stage that failed, "" where none did. */
    std::string failed() const {
        return report_.failed == nullptr ? "" : report_.failed;
    }

    /* Why, in one line; "" where nothing failed. */
    std::string problem() const {
        return report_.problem;
    }

    /* All numbers. */
    const tfx_report &details() const noexcept {
        return report_;
    }

    /* Print it for people, or as one line of JSON. */
    void print(std::FILE *file) const {
        tfx_report_print(&report_, file);
    }
    void print_json(std::FILE *file) const {
        tfx_report_json(&report_, file);
    }

private:
    tfx_status status_;
    tfx_report report_;
};

/* A loaded bundle. It can be moved but not copied; using one that was moved from throws Error (TFX_INPUT). */
class Encoder {
public:
    /* Check and load the bundle in a folder. */
    explicit Encoder(const std::filesystem::path &bundle, const Options &options = {}) {
        tfx_error error;
        tfx_encoder *opened = nullptr;
        const std::string library = options.library.string();
        const tfx_options given = {library.empty() ? nullptr : library.c_str(), options.threads};
        check(tfx_open(bundle.string().c_str(), &given, &opened, &error), error);
        encoder_.reset(opened);
    }

    /* What was loaded: inputs, outputs, limits. Owned by the encoder. */
    const tfx_info &info() const {
        return *tfx_get_info(get());
    }

    /* One vector per text, in the order given. */
    std::vector<std::vector<float>> embed(const std::vector<std::string> &texts) const {
        return embed_tokens(tokenize_all(texts));
    }

    /* The same for texts that tokenize() has taken already. */
    std::vector<std::vector<float>> embed_tokens(const std::vector<Tokens> &tokens) const {
        const std::vector<tfx_tokens> views = as_views(tokens);
        tfx_error error;
        tfx_tensor found = {};
        check(tfx_embed_tokens(get(), views.data(), views.size(), &found, &error), error);
        const std::unique_ptr<tfx_tensor, Free<tfx_tensor_free>> owner(&found);
        const auto *values = static_cast<const float *>(found.data);
        const auto width = static_cast<std::size_t>(found.shape[1]);
        std::vector<std::vector<float>> vectors;
        vectors.reserve(tokens.size());
        for (std::size_t i = 0; i < tokens.size(); i++) {
            vectors.emplace_back(values + i * width, values + (i + 1) * width);
        }
        return vectors;
    }

    /* The vector of one text: a string, a string_view or an array of char; embed({...}) takes a list of texts. */
    template <class Text, std::enable_if_t<std::is_convertible_v<const Text &, std::string_view>, int> = 0>
    std::vector<float> embed(const Text &text) const {
        return std::move(embed(std::vector<std::string>{std::string(std::string_view(text))}).front());
    }

    /* Every output of the model for each text, without the batch axis and cut to the text's own length. */
    std::vector<std::vector<Tensor>> run_texts(const std::vector<std::string> &texts) const {
        return run_tokens(tokenize_all(texts));
    }

    /* The same for texts that tokenize() has taken already. */
    std::vector<std::vector<Tensor>> run_tokens(const std::vector<Tokens> &tokens) const {
        const std::vector<tfx_tokens> views = as_views(tokens);
        std::vector<std::shared_ptr<tfx_outputs>> owners; /* made first: nothing is lost when memory runs out */
        owners.reserve(tokens.size());
        for (std::size_t i = 0; i < tokens.size(); i++) {
            owners.push_back(new_outputs());
        }
        std::vector<tfx_outputs> found(tokens.size());
        tfx_error error;
        const tfx_status status = tfx_run_tokens(get(), views.data(), views.size(), found.data(), &error);
        for (std::size_t i = 0; i < tokens.size() && status == TFX_OK; i++) {
            *owners[i] = found[i];
        }
        check(status, error);
        std::vector<std::vector<Tensor>> outputs(owners.size());
        std::transform(owners.begin(), owners.end(), outputs.begin(), to_tensors);
        return outputs;
    }

    /* Run the model once on arrays, (batch, sequence) for ids and masks. */
    std::vector<Tensor> run(const std::vector<Tensor> &inputs) const {
        std::vector<tfx_tensor> views;
        for (const Tensor &input : inputs) {
            views.push_back(input.view());
            views.back().name = input.view().name == nullptr ? "" : input.view().name;
        }
        const std::shared_ptr<tfx_outputs> outputs = new_outputs();
        tfx_error error;
        check(tfx_run(get(), views.data(), views.size(), outputs.get(), &error), error);
        return to_tensors(outputs);
    }

    /* The tokens of one text, cut to the longest that tokenizer and model take. */
    Tokens tokenize(std::string_view text) const {
        const std::string copy(text);
        if (copy.find('\0') != std::string::npos) { /* C ends a text there: the rest would be lost in silence */
            throw Error(TFX_INPUT, "holds a NUL character");
        }
        tfx_error error;
        tfx_tokens found = {};
        check(tfx_tokenize(get(), copy.c_str(), &found, &error), error);
        const std::unique_ptr<tfx_tokens, Free<tfx_tokens_free>> owner(&found);
        return {{found.ids, found.ids + found.count}, {found.types, found.types + found.count}, found.dropped};
    }

    /* Check a bundle against what was recorded when it was made. Throws nothing for what it finds. */
    static Report self_check(const std::filesystem::path &bundle, const Options &options = {}) {
        const std::string library = options.library.string();
        const tfx_options given = {library.empty() ? nullptr : library.c_str(), options.threads};
        tfx_report report;
        const tfx_status status = tfx_self_check(bundle.string().c_str(), &given, &report, nullptr);
        constexpr std::string_view app = "cpp";
        report.app[app.copy(report.app, sizeof report.app - 1)] = '\0';
        return Report(status, report);
    }

private:
    /* Calls a function of C. */
    template <auto function> struct Free {
        template <class T> void operator()(T *pointer) const noexcept {
            function(pointer);
        }
    };

    static void check(tfx_status status, const tfx_error &error) {
        if (status != TFX_OK) {
            throw Error(status, error.message);
        }
    }

    static std::shared_ptr<tfx_outputs> new_outputs() {
        return {new tfx_outputs(), [](tfx_outputs *outputs) {
                    tfx_outputs_free(outputs);
                    delete outputs;
                }};
    }

    static std::vector<Tensor> to_tensors(const std::shared_ptr<tfx_outputs> &outputs) {
        std::vector<Tensor> tensors;
        for (std::size_t i = 0; i < outputs->count; i++) {
            tensors.emplace_back(outputs->items[i], outputs);
        }
        return tensors;
    }

    /* As C sees tokens; nothing is written through the pointers. */
    static std::vector<tfx_tokens> as_views(const std::vector<Tokens> &tokens) {
        std::vector<tfx_tokens> views;
        for (const Tokens &each : tokens) {
            if (each.types.size() != each.ids.size()) {
                throw Error(TFX_INPUT, "tokens: found " + std::to_string(each.types.size()) + " types, wanted " +
                                           std::to_string(each.ids.size()) + ", as many as ids");
            }
            views.push_back({const_cast<std::int64_t *>(each.ids.data()), const_cast<std::int64_t *>(each.types.data()),
                             each.ids.size(), each.dropped});
        }
        return views;
    }

    /* Tokenize texts; an error says which one it is about. */
    std::vector<Tokens> tokenize_all(const std::vector<std::string> &texts) const {
        std::vector<Tokens> tokens;
        tokens.reserve(texts.size());
        for (std::size_t i = 0; i < texts.size(); i++) {
            try {
                tokens.push_back(tokenize(texts[i]));
            } catch (const Error &error) {
                throw Error(error.status(), "texts[" + std::to_string(i) + "]: " + error.what());
            }
        }
        return tokens;
    }

    tfx_encoder *get() const {
        if (encoder_ == nullptr) {
            throw Error(TFX_INPUT, "encoder: was moved from, wanted a loaded one");
        }
        return encoder_.get();
    }

    std::unique_ptr<tfx_encoder, Free<tfx_close>> encoder_;
};

} // namespace tfx

#endif
