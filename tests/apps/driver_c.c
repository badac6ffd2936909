/*
 * Calls the C app's library for tests/apps/test_c.py.
 *
 *   driver_c run LIBRARY BUNDLE      {"inputs": [{"name", "dtype", "shape", "values"}]} on stdin; answers the outputs
 *   driver_c threads LIBRARY BUNDLE  texts on stdin, a line each; several threads on one encoder give the same bits
 *   driver_c misuse LIBRARY BUNDLE   what callers get wrong; nothing leaks, results are empty
 */
#include <cjson/cJSON.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "print.h"
#include "tensor.h"
#include "tfx.h"

#define THREADS 4
#define ROUNDS 5
#define MOST_TEXTS 256

static int fail(tfx_status status, const tfx_error *error) {
    fprintf(stderr, "error: %s\n", error->message);
    return (int)status;
}

static char *read_stdin(void) {
    static char content[1 << 20];
    content[fread(content, 1, sizeof content - 1, stdin)] = '\0';
    return content;
}

/* ---- run ---- */

static void store(tfx_tensor *tensor, size_t i, double value) {
    switch (tensor->dtype) {
        case TFX_BOOL:
        case TFX_UINT8: ((uint8_t *)tensor->data)[i] = (uint8_t)value; break;
        case TFX_INT8: ((int8_t *)tensor->data)[i] = (int8_t)value; break;
        case TFX_INT16: ((int16_t *)tensor->data)[i] = (int16_t)value; break;
        case TFX_INT32: ((int32_t *)tensor->data)[i] = (int32_t)value; break;
        case TFX_INT64: ((int64_t *)tensor->data)[i] = (int64_t)value; break;
        case TFX_UINT64: ((uint64_t *)tensor->data)[i] = (uint64_t)value; break;
        case TFX_FLOAT32: ((float *)tensor->data)[i] = (float)value; break;
        default: ((double *)tensor->data)[i] = value; break;
    }
}

static tfx_status read_input(const cJSON *entry, tfx_tensor *tensor, tfx_error *error) {
    int64_t shape[TFX_MAX_RANK] = {0};
    size_t rank = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(entry, "shape")) {
        shape[rank++] = (int64_t)item->valuedouble;
    }
    const tfx_dtype dtype = tfx_dtype_of(cJSON_GetObjectItemCaseSensitive(entry, "dtype")->valuestring);
    const char *name = cJSON_GetObjectItemCaseSensitive(entry, "name")->valuestring;
    const tfx_status status = tfx_tensor_new(tensor, name, dtype, rank, shape, error);
    size_t i = 0;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(entry, "values")) {
        if (status == TFX_OK) {
            store(tensor, i++, item->valuedouble);
        }
    }
    return status;
}

static int run(tfx_encoder *encoder) {
    tfx_error error;
    tfx_tensor inputs[8] = {0};
    tfx_outputs outputs = {NULL, 0};
    size_t count = 0;
    tfx_status status = TFX_OK;
    cJSON *json = cJSON_Parse(read_stdin());
    const cJSON *entry;
    cJSON_ArrayForEach(entry, cJSON_GetObjectItemCaseSensitive(json, "inputs")) {
        if (status == TFX_OK) {
            status = read_input(entry, &inputs[count++], &error);
        }
    }
    if (status == TFX_OK) {
        status = tfx_run(encoder, inputs, count, &outputs, &error);
    }
    for (size_t i = 0; i < count; i++) {
        tfx_tensor_free(&inputs[i]);
    }
    cJSON_Delete(json);
    if (status != TFX_OK) {
        return outputs.items == NULL && outputs.count == 0 ? fail(status, &error) : 99;
    }
    tfx_print_outputs(stdout, &outputs);
    tfx_outputs_free(&outputs);
    return 0;
}

/* ---- threads ---- */

typedef struct {
    tfx_encoder *encoder;
    const char **texts;
    size_t count;
    const tfx_tensor *wanted;
    bool same;
} work;

static void *embed_again(void *argument) {
    work *w = argument;
    w->same = true;
    for (int i = 0; i < ROUNDS; i++) {
        tfx_tensor found;
        tfx_error error;
        if (tfx_embed(w->encoder, w->texts, w->count, &found, &error) != TFX_OK) {
            w->same = false;
            return NULL;
        }
        w->same = w->same && found.shape[0] == w->wanted->shape[0] && found.shape[1] == w->wanted->shape[1] &&
                  memcmp(found.data, w->wanted->data, tfx_tensor_size(&found) * sizeof(float)) == 0;
        tfx_tensor_free(&found);
    }
    return NULL;
}

static int threads(tfx_encoder *encoder) {
    const char *texts[MOST_TEXTS];
    size_t count = 0;
    tfx_error error;
    tfx_tensor wanted;
    for (char *line = strtok(read_stdin(), "\n"); line != NULL && count < MOST_TEXTS; line = strtok(NULL, "\n")) {
        texts[count++] = line;
    }
    const tfx_status status = tfx_embed(encoder, texts, count, &wanted, &error);
    if (status != TFX_OK) {
        return fail(status, &error);
    }
    pthread_t ids[THREADS];
    work all[THREADS];
    for (int i = 0; i < THREADS; i++) {
        all[i] = (work){encoder, texts, count, &wanted, false};
        if (pthread_create(&ids[i], NULL, embed_again, &all[i]) != 0) {
            return 98;
        }
    }
    bool same = true;
    for (int i = 0; i < THREADS; i++) {
        pthread_join(ids[i], NULL);
        same = same && all[i].same;
    }
    tfx_tensor_free(&wanted);
    printf("%s\n", same ? "same" : "different");
    return 0;
}

/* ---- misuse ---- */

/* Print what a call that must fail says; anything left in its result is a failure of the test. */
#define EXPECT(what, call, left)                                                                                       \
    do {                                                                                                               \
        const tfx_status found_ = (call);                                                                              \
        printf("%s: %d: %s: %s\n", what, (int)found_, error.message, (left) == NULL ? "empty" : "left");               \
    } while (0)

static int misuse(tfx_encoder *encoder, const char *bundle, const tfx_options *options) {
    tfx_error error;
    tfx_tensor vectors;
    tfx_tokens tokens;
    tfx_outputs results[2];
    const char *texts[] = {"a text", "\xff"};
    const char *nothing[] = {NULL};

    EXPECT("none", tfx_embed(encoder, texts, 0, &vectors, &error), vectors.data);
    EXPECT("null", tfx_embed(encoder, nothing, 1, &vectors, &error), vectors.data);
    EXPECT("bytes", tfx_embed(encoder, texts, 2, &vectors, &error), vectors.data);
    EXPECT("raw", tfx_run_texts(encoder, texts, 2, results, &error), results[0].items);
    EXPECT("tokens", tfx_tokenize(encoder, texts[1], &tokens, &error), tokens.ids);
    tfx_tensor_free(&vectors); /* empty ones are released like others */
    tfx_tokens_free(&tokens);
    tfx_outputs_free(&results[0]);
    tfx_close(NULL);

    const tfx_tensor odd = {"input_ids", TFX_INT64, TFX_MAX_RANK + 1, {1}, NULL};
    EXPECT("rank", tfx_run(encoder, &odd, 1, &results[0], &error), results[0].items);
    const tfx_tensor unnamed = {NULL, TFX_INT64, 0, {0}, NULL};
    EXPECT("name", tfx_run(encoder, &unnamed, 1, &results[0], &error), results[0].items);
    printf("quiet: %d\n", (int)tfx_embed(encoder, texts, 0, &vectors, NULL));

    tfx_encoder *other;
    EXPECT("folder", tfx_open("/no/such/folder", options, &other, &error), other);
    const tfx_options negative = {options->library, -1};
    EXPECT("threads", tfx_open(bundle, &negative, &other, &error), other);

    /* Loading again and again gives the same bits, and the results outlive what made them. */
    tfx_tensor first;
    if (tfx_embed(encoder, texts, 1, &first, &error) != TFX_OK) {
        return 97;
    }
    bool same = true;
    for (int i = 0; i < 3; i++) {
        if (tfx_open(bundle, options, &other, &error) != TFX_OK ||
            tfx_embed(other, texts, 1, &vectors, &error) != TFX_OK) {
            return fail(TFX_INPUT, &error);
        }
        tfx_close(other);
        same = same && memcmp(first.data, vectors.data, tfx_tensor_size(&first) * sizeof(float)) == 0;
        tfx_tensor_free(&vectors);
    }
    tfx_tensor_free(&first);
    printf("again: %s\n", same ? "same" : "different");
    return 0;
}

int main(int count, char **words) {
    if (count != 4) {
        return 96;
    }
    tfx_error error;
    tfx_encoder *encoder;
    const tfx_options options = {words[2], 1};
    const tfx_status status = tfx_open(words[3], &options, &encoder, &error);
    if (status != TFX_OK) {
        return fail(status, &error);
    }
    int code = 95;
    if (strcmp(words[1], "run") == 0) {
        code = run(encoder);
    } else if (strcmp(words[1], "threads") == 0) {
        code = threads(encoder);
    } else if (strcmp(words[1], "misuse") == 0) {
        code = misuse(encoder, words[3], &options);
    }
    tfx_close(encoder);
    return code;
}
