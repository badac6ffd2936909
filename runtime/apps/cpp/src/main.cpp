/* The command line: texts to vectors, tokens or raw outputs, and the self-check. Its words are those of the C one. */
#include <cerrno>
#include <cstring>
#include <iostream>

#include "tfx.hpp"

extern "C" {
#include "arguments.h"
#include "json.h"
#include "print.h"
}

#ifndef TFX_DEFAULT_BUNDLE
#define TFX_DEFAULT_BUNDLE ""
#endif

namespace {

/* The words of the command line; the strings are those of main. */
class Arguments {
public:
    Arguments(int count, char **words) {
        tfx_error error;
        const tfx_status status = tfx_arguments_read(count, words, TFX_DEFAULT_BUNDLE, &given_, &error);
        if (status != TFX_OK) {
            tfx_arguments_free(&given_);
            throw tfx::Error(status, error.message);
        }
    }
    Arguments(const Arguments &) = delete;
    Arguments &operator=(const Arguments &) = delete;
    ~Arguments() {
        tfx_arguments_free(&given_);
    }

    const tfx_arguments *operator->() const {
        return &given_;
    }

    tfx::Options options() const {
        return {given_.options.library == nullptr ? "" : given_.options.library, given_.options.threads};
    }

    std::vector<std::string> texts() const {
        return {given_.texts, given_.texts + given_.count};
    }

private:
    tfx_arguments given_ = {};
};

/* An error that says which text it is about. */
tfx::Error about(std::size_t number, const tfx::Error &error) {
    return {error.status(), "texts[" + std::to_string(number) + "]: " + error.what()};
}

/* Read one line of JSON, which is to be a string. */
std::string read_json(const std::string &line, const std::string &name) {
    tfx_error error;
    cJSON *json = nullptr;
    const tfx_status status = tfx_json_parse(line.c_str(), line.size(), name.c_str(), &json, &error);
    if (status != TFX_OK) {
        throw tfx::Error(status, error.message);
    }
    const std::unique_ptr<cJSON, void (*)(cJSON *)> owner(json, cJSON_Delete);
    if (!cJSON_IsString(json)) {
        const tfx_status wrong = tfx_json_wrong(json, name.c_str(), "a string", &error);
        throw tfx::Error(wrong, error.message);
    }
    return json->valuestring;
}

void end_line() {
    std::fputc('\n', stdout);
}

/* Tokenize a text, say on stderr where it was cut, and print its tokens where they are wanted. */
tfx::Tokens make_tokens(const tfx::Encoder &encoder, const std::string &text, std::size_t number, bool print) {
    try {
        tfx::Tokens tokens = encoder.tokenize(text);
        if (tokens.dropped > 0) {
            std::fprintf(stderr, "note: texts[%zu]: cut to %zu tokens, which is the most; %zu were left out\n", number,
                         tokens.ids.size(), tokens.dropped);
        }
        if (print) {
            const tfx_tokens view = {tokens.ids.data(), tokens.types.data(), tokens.ids.size(), tokens.dropped};
            tfx_print_tokens(stdout, &view);
            end_line();
        }
        return tokens;
    } catch (const tfx::Error &error) {
        throw about(number, error);
    }
}

void print_raw(const std::vector<tfx::Tensor> &outputs) {
    std::vector<tfx_tensor> views;
    for (const tfx::Tensor &output : outputs) {
        views.push_back(output.view());
    }
    const tfx_outputs all = {views.data(), views.size()};
    tfx_print_outputs(stdout, &all);
    end_line();
}

/* Answer texts, of which the first has this number. */
void answer(const tfx::Encoder &encoder, tfx_mode mode, const std::vector<std::string> &texts, std::size_t first) {
    std::vector<tfx::Tokens> tokens;
    for (std::size_t i = 0; i < texts.size(); i++) {
        tokens.push_back(make_tokens(encoder, texts[i], first + i, mode == TFX_TOKENS));
    }
    if (mode == TFX_VECTORS) {
        for (const std::vector<float> &vector : encoder.embed_tokens(tokens)) {
            const tfx::Tensor tensor("vector", {static_cast<std::int64_t>(vector.size())}, vector);
            tfx_print_tensor(stdout, &tensor.view());
            end_line();
        }
    } else if (mode == TFX_RAW) {
        for (const std::vector<tfx::Tensor> &outputs : encoder.run_tokens(tokens)) {
            print_raw(outputs);
        }
    }
}

/* Answer the standard input line by line. */
void answer_lines(const tfx::Encoder &encoder, const Arguments &given) {
    std::string line;
    errno = 0;
    for (std::size_t number = 0; std::getline(std::cin, line); number++, errno = 0) {
        const std::string name = "texts[" + std::to_string(number) + "]";
        if (!line.empty() && line.back() == '\r') {
            line.pop_back();
        }
        answer(encoder, given->mode, {given->jsonl ? read_json(line, name) : line}, number);
        if (std::fflush(stdout) != 0) {
            return; /* main says so */
        }
    }
    if (std::cin.bad()) {
        /* A stream says no more of memory that ran out than of a disk that failed. */
        throw tfx::Error(errno == ENOMEM ? TFX_MACHINE : TFX_INPUT,
                         std::string("standard input: ") + std::strerror(errno));
    }
}

/* Print a bundle's self-check, and return its exit code. */
int self_check(const Arguments &given) {
    const tfx::Report report = tfx::Encoder::self_check(given->bundle, given.options());
    if (given->json) {
        report.print_json(stdout);
    } else {
        report.print(stdout);
    }
    if (!report.passed()) {
        std::fprintf(stderr, "error: %s\n", report.problem().c_str());
    }
    return report.status();
}

int run(const Arguments &given, const char *program) {
    if (given->mode == TFX_VERSION) {
        std::printf("%s\n", tfx_version());
    } else if (given->mode == TFX_HELP) {
        tfx_arguments_help(stdout, program, TFX_DEFAULT_BUNDLE);
    } else if (given->mode == TFX_SELF_CHECK) {
        return self_check(given);
    } else {
        const tfx::Encoder encoder(given->bundle, given.options());
        if (given->standard_input) {
            answer_lines(encoder, given);
        } else {
            answer(encoder, given->mode, given.texts(), 0);
        }
    }
    return TFX_OK;
}

} // namespace

int main(int count, char **words) {
    int status = TFX_OK;
    try {
        status = run(Arguments(count, words), words[0]);
    } catch (const tfx::Error &error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        status = error.status();
    } catch (const std::bad_alloc &) {
        std::fprintf(stderr, "error: out of memory\n");
        status = TFX_MACHINE;
    }
    if ((std::fflush(stdout) != 0 || std::ferror(stdout) != 0) && status == TFX_OK) {
        std::fprintf(stderr, "error: standard output: %s\n", std::strerror(errno));
        status = TFX_INPUT;
    }
    return status;
}
