/*
 * Reads damaged copies of a file with the C app's readers: fuzz KIND FILE SCRATCH ROUNDS.
 *
 * Built with sanitizers, which end the program where a reader touches what it must not. It prints how many copies were
 * read and how many refused.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bundle.h"
#include "external.h"
#include "file.h"
#include "golden.h"

static uint64_t state = 88172645463325252u;

static size_t below(size_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return limit == 0 ? 0 : (size_t)(state % limit);
}

/* Damage the bytes in one of several ways; returns how many are left. The header is hit most. */
static size_t damage(unsigned char *bytes, size_t size) {
    const size_t reach = below(2) == 0 && size > 4096 ? 4096 : size;
    const size_t at = below(reach);
    switch (below(5)) {
        case 0: return at;
        case 1: bytes[at] ^= (unsigned char)(1u << below(8)); break;
        case 2: bytes[at] = (unsigned char)below(256); break;
        case 3: {
            const size_t from = below(reach);
            const size_t most = size - (at > from ? at : from);
            memmove(bytes + at, bytes + from, below(most < 64 ? most : 64));
            break;
        }
        default: {
            const uint64_t values[] = {0, UINT64_MAX, INT64_MAX, (uint64_t)1 << 63, size, size - 8, 100000000};
            const uint64_t value = values[below(sizeof values / sizeof values[0])];
            memcpy(bytes + at, &value, size - at < sizeof value ? size - at : sizeof value);
        }
    }
    return size;
}

static tfx_status read_golden(const char *path, tfx_error *error) {
    tfx_golden golden;
    TFX_TRY(tfx_golden_open(path, &golden, error));
    for (size_t i = 0; i < golden.count; i++) {
        tfx_outputs tensors;
        if (tfx_golden_inputs(&golden, i, &tensors, error) == TFX_OK) {
            tfx_outputs_free(&tensors);
        }
        if (tfx_golden_outputs(&golden, i, &tensors, error) == TFX_OK) {
            tfx_outputs_free(&tensors);
        }
    }
    tfx_golden_close(&golden);
    return TFX_OK;
}

static tfx_status read_copy(const char *kind, const char *path, tfx_error *error) {
    tfx_manifest manifest = {0};
    if (strcmp(kind, "golden") == 0) {
        return read_golden(path, error);
    }
    if (strcmp(kind, "model") == 0) {
        tfx_file weights = {"model.onnx.data", INT64_MAX / 2, ""};
        manifest.files = &weights;
        manifest.file_count = 1;
        return tfx_external_check(path, &manifest, error);
    }
    TFX_TRY(tfx_manifest_read(path, &manifest, error));
    tfx_manifest_free(&manifest);
    return TFX_OK;
}

int main(int count, char **words) {
    if (count != 5) {
        return 2;
    }
    char *content;
    size_t size;
    size_t refused = 0;
    const long rounds = strtol(words[4], NULL, 10);
    tfx_error error = {""};
    if (tfx_read_file(words[2], (size_t)1 << 30, &content, &size, &error) != TFX_OK) {
        fprintf(stderr, "%s\n", error.message);
        return 2;
    }
    for (long i = 0; i < rounds; i++) {
        unsigned char *copy = malloc(size + 1);
        if (copy == NULL) {
            return 3;
        }
        memcpy(copy, content, size);
        size_t left = size;
        for (size_t times = below(4) + 1; times > 0 && left > 0; times--) {
            left = damage(copy, left);
        }
        FILE *file = fopen(words[3], "wb");
        if (file == NULL || fwrite(copy, 1, left, file) != left || fclose(file) != 0) {
            return 3;
        }
        free(copy);
        const tfx_status status = read_copy(words[1], words[3], &error);
        if (status != TFX_OK && (status != TFX_INPUT || error.message[0] == '\0' ||
                                 tfx_utf8_check(error.message, strlen(error.message)) != strlen(error.message))) {
            fprintf(stderr, "round %ld: status %d: %s\n", i, (int)status, error.message);
            return 1;
        }
        refused += status != TFX_OK ? 1 : 0;
    }
    free(content);
    printf("%ld %zu\n", rounds, refused);
    return 0;
}
