/*
 * Uses tfx.hpp for tests/apps/test_cpp.py: driver_cpp LIBRARY BUNDLE RAW_BUNDLE
 *
 * Ends with 0 when all is as it should be, else at the first that is not, which is named.
 */
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <thread>

#include "tfx.hpp"

namespace {

#define WANT(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::cerr << "line " << __LINE__ << ": " << #condition << "\n";                                            \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (false)

/* Return the error that a call ends with. */
template <class F> tfx::Error error_of(int line, F call) {
    try {
        call();
    } catch (const tfx::Error &error) {
        return error;
    }
    std::cerr << "line " << line << ": no error\n";
    std::exit(1);
}

#define WANT_ERROR(wanted, words, call)                                                                                \
    do {                                                                                                               \
        const tfx::Error found = error_of(__LINE__, [&] { static_cast<void>(call); });                                 \
        if (found.status() != (wanted) || std::string(found.what()).find(words) == std::string::npos) {                \
            std::cerr << "line " << __LINE__ << ": " << found.status() << " " << found.what() << "\n";                 \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (false)

bool close(const std::vector<float> &one, const std::vector<float> &other) {
    bool all = one.size() == other.size() && !one.empty();
    for (std::size_t i = 0; i < one.size() && all; i++) {
        all = std::fabs(one[i] - other[i]) < 1e-5F;
    }
    return all;
}

void texts(const tfx::Encoder &encoder) {
    const std::vector<std::string> given = {"a text", "another, which is longer", "", "caf\xC3\xA9"};
    const auto vectors = encoder.embed(given);
    WANT(vectors.size() == 4);
    WANT(encoder.embed({"a text"}).size() == 1 && encoder.embed({given[0]}).size() == 1);
    WANT(close(encoder.embed(std::string_view("a text!").substr(0, 6)), vectors[0]));
    WANT(vectors[0].size() == static_cast<std::size_t>(encoder.info().dimension));
    for (std::size_t i = 0; i < given.size(); i++) {
        WANT(close(vectors[i], encoder.embed(given[i])));
    }
    const tfx::Tokens tokens = encoder.tokenize("a text");
    WANT(tokens.ids.size() >= 3 && tokens.types.size() == tokens.ids.size() && tokens.dropped == 0);
    std::string longer;
    for (int i = 0; i < 500; i++) {
        longer += "word ";
    }
    WANT(encoder.tokenize(longer).dropped > 0);
    WANT(encoder.tokenize(std::string_view(longer).substr(0, 4)).ids.size() < tokens.ids.size() + 4);

    const auto outputs = encoder.run_texts(given);
    WANT(outputs.size() == 4 && outputs[0].size() == encoder.info().output_count);
    WANT(outputs[0][0].shape().front() == static_cast<std::int64_t>(tokens.ids.size()));
    bool pooled = false;
    for (const tfx::Tensor &output : outputs[1]) {
        pooled = pooled || (output.name() == encoder.info().pooled && close(output.values<float>(), vectors[1]));
    }
    WANT(pooled);
}

void arrays(const tfx::Encoder &encoder) {
    const tfx::Tokens tokens = encoder.tokenize("a text of words");
    const auto length = static_cast<std::int64_t>(tokens.ids.size());
    const std::vector<std::int32_t> narrow(tokens.ids.begin(), tokens.ids.end());
    const std::vector<bool> attended(tokens.ids.size(), true);
    const tfx::Tensor ids("input_ids", {1, length}, narrow);
    const tfx::Tensor mask("attention_mask", {1, length}, std::vector<std::int64_t>(narrow.size(), 1));
    std::vector<tfx::Tensor> outputs = encoder.run({ids, mask});
    WANT(outputs.size() == encoder.info().output_count);
    WANT(outputs[0].shape() == (std::vector<std::int64_t>{1, length, encoder.info().dimension}));
    WANT(outputs[0].dtype() == TFX_FLOAT32);

    tfx::Tensor kept = outputs[0]; /* shares what the others are dropped of */
    const float first = *kept.data<float>();
    outputs.clear();
    WANT(std::isfinite(first) && *kept.data<float>() == first && kept.values<float>().size() == kept.size());
    WANT_ERROR(TFX_INPUT, "found float32, wanted int64", kept.data<std::int64_t>());
    const tfx::Tensor moved = std::move(kept);
    WANT(kept.size() == 0 && kept.shape().empty() && kept.name().empty()); // NOLINT: moved from on purpose
    WANT(kept.data<float>() == nullptr && kept.values<float>().empty());
    WANT(*moved.data<float>() == first);
    kept = moved;
    WANT(kept.size() == moved.size());
    kept = std::move(kept.size() > 0 ? kept : kept); // NOLINT: to itself
    WANT(tfx::Tensor("mask", {2, 1}, std::vector<bool>{true, false}).values<bool>() ==
         (std::vector<bool>{true, false}));
    WANT(tfx::Tensor("one", {}, std::vector<double>{3}).values<double>() == std::vector<double>{3});
    WANT(tfx::Tensor("none", {0, 5}, std::vector<float>{}).size() == 0);

    using Shape = std::vector<std::int64_t>;
    const std::vector<float> two = {1, 2};
    for (const Shape &shape :
         {Shape{3}, Shape{-1, -2}, Shape{1}, Shape{}, Shape{INT64_MAX, INT64_MAX, 4}, Shape(9, 1)}) {
        WANT_ERROR(TFX_INPUT, "two: found 2 values", tfx::Tensor("two", shape, two));
    }
    WANT_ERROR(TFX_INPUT, "input_ids: found float32", encoder.run({{"input_ids", {1, 2}, two}, mask}));
    WANT_ERROR(TFX_INPUT, "input_ids: missing", encoder.run({mask}));
    WANT_ERROR(TFX_INPUT, "input_ids", encoder.run({}));
    WANT_ERROR(TFX_INPUT, "", encoder.run({ids, ids}));
    WANT_ERROR(TFX_INPUT, "", encoder.run({tfx::Tensor()}));
    WANT_ERROR(TFX_INPUT, "input_ids: found -1", encoder.run({{"input_ids", {1, 1}, std::vector<std::int64_t>{-1}}}));
}

void failures(const tfx::Encoder &encoder, const char *library, const char *bundle, const char *raw_bundle) {
    WANT_ERROR(TFX_INPUT, "empty", encoder.embed(std::vector<std::string>()));
    WANT_ERROR(TFX_INPUT, "empty", encoder.run_texts({}));
    WANT_ERROR(TFX_INPUT, "texts[1]: not UTF-8 at byte 2", encoder.embed({"ok", "ab\xFF"}));
    WANT_ERROR(TFX_INPUT, "texts[0]: holds a NUL", encoder.embed({std::string("a\0b", 3)}));
    WANT_ERROR(TFX_INPUT, "holds a NUL", encoder.tokenize(std::string_view("a\0b", 3)));
    WANT_ERROR(TFX_INPUT, "not UTF-8", encoder.tokenize("\xC3"));
    WANT_ERROR(TFX_INPUT, "/no/such", tfx::Encoder("/no/such", {library, 0}));
    WANT_ERROR(TFX_INPUT, "threads", tfx::Encoder(bundle, {library, -1}));
    WANT_ERROR(TFX_MACHINE, "/no/such.so", tfx::Encoder(bundle, {"/no/such.so", 0}));
    const tfx::Encoder raw(raw_bundle, {library, 1});
    WANT_ERROR(TFX_INPUT, "", raw.embed("a text"));
    WANT(raw.info().pooled == nullptr && !raw.run_texts({"a text"})[0].empty());
}

void moving(const char *library, const char *bundle) {
    static_assert(!std::is_copy_constructible_v<tfx::Encoder> && std::is_nothrow_move_constructible_v<tfx::Encoder>);
    static_assert(!std::is_copy_assignable_v<tfx::Encoder> && std::is_nothrow_move_assignable_v<tfx::Encoder>);
    tfx::Encoder one(bundle, {library, 1});
    const std::vector<float> wanted = one.embed("a text");
    tfx::Encoder other = std::move(one);
    WANT(other.embed("a text") == wanted);
    WANT_ERROR(TFX_INPUT, "moved from", one.embed("a text")); // NOLINT: moved from on purpose
    WANT_ERROR(TFX_INPUT, "moved from", one.tokenize("a text"));
    WANT_ERROR(TFX_INPUT, "moved from", one.run_texts({"a text"}));
    WANT_ERROR(TFX_INPUT, "moved from", one.run({}));
    WANT_ERROR(TFX_INPUT, "moved from", one.info());
    one = std::move(other);
    WANT(one.embed("a text") == wanted);
    one = tfx::Encoder(bundle, {library, 2}); /* the first is closed */
    WANT(close(one.embed("a text"), wanted));
}

void threads(const tfx::Encoder &encoder) {
    const std::vector<float> wanted = encoder.embed("a text");
    std::vector<std::thread> all;
    std::vector<int> right(4, 0);
    for (std::size_t i = 0; i < right.size(); i++) {
        all.emplace_back([&, i] {
            for (int round = 0; round < 10; round++) {
                right[i] += close(encoder.embed({"a text", std::string(i, 'x')})[0], wanted) ? 1 : 0;
            }
        });
    }
    for (std::thread &thread : all) {
        thread.join();
    }
    WANT(right == std::vector<int>(4, 10));
}

void self_check(const char *library, const char *bundle) {
    const tfx::Report good = tfx::Encoder::self_check(bundle, {library, 1});
    WANT(good.passed() && good.status() == TFX_OK && good.failed().empty() && good.problem().empty());
    WANT(good.details().stage_count == TFX_STAGES && std::string(good.details().app) == "cpp");
    const tfx::Report bad = tfx::Encoder::self_check("/no/such", {library, 1});
    WANT(!bad.passed() && bad.status() == TFX_INPUT && bad.problem().find("/no/such") != std::string::npos);
    const tfx::Report none = tfx::Encoder::self_check(bundle, {"/no/such.so", 1});
    WANT(none.status() == TFX_MACHINE && none.failed() == "runtime");
}

} // namespace

int main(int count, char **words) {
    WANT(count == 4);
    const tfx::Encoder encoder(words[2], {words[1], 0});
    texts(encoder);
    arrays(encoder);
    failures(encoder, words[1], words[2], words[3]);
    moving(words[1], words[2]);
    threads(encoder);
    self_check(words[1], words[2]);
    std::cout << "all as wanted\n";
    return 0;
}
