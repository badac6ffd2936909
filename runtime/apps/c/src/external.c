#include "platform.h"

#include "external.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEEPEST 100 /* messages in messages; protobuf, and so onnxruntime, reads no more */

/* Messages along onnx.proto that can hold a tensor; everything else is skipped. */
typedef enum { NONE, MODEL, TRAINING, FUNCTION, GRAPH, NODE, ATTRIBUTE, SPARSE, TENSOR, ENTRY } message;

static const struct {
    message owner;
    unsigned field;
    message inner;
} FIELDS[] = {
    {MODEL, 7, GRAPH},       {MODEL, 20, TRAINING},   {MODEL, 25, FUNCTION},     {TRAINING, 1, GRAPH},
    {TRAINING, 2, GRAPH},    {FUNCTION, 7, NODE},     {FUNCTION, 11, ATTRIBUTE}, {GRAPH, 1, NODE},
    {GRAPH, 5, TENSOR},      {GRAPH, 15, SPARSE},     {NODE, 5, ATTRIBUTE},      {ATTRIBUTE, 5, TENSOR},
    {ATTRIBUTE, 6, GRAPH},   {ATTRIBUTE, 10, TENSOR}, {ATTRIBUTE, 11, GRAPH},    {ATTRIBUTE, 22, SPARSE},
    {ATTRIBUTE, 23, SPARSE}, {SPARSE, 1, TENSOR},     {SPARSE, 2, TENSOR},       {TENSOR, 13, ENTRY},
};

typedef struct {
    const unsigned char *at;
    const unsigned char *end;
} bytes;

/* What a tensor says about its place: protobuf strings, not ended by NUL. */
typedef struct {
    bytes location;
    bytes offset;
    bytes length;
} place;

typedef struct {
    const char *path;
    const tfx_manifest *manifest;
    tfx_error *error;
} context;

static tfx_status no_onnx(const context *c) {
    return tfx_fail(c->error, TFX_INPUT, "%s: not an ONNX file", c->path);
}

static bool read_varint(bytes *from, uint64_t *value) {
    *value = 0;
    for (unsigned shift = 0; shift < 70 && from->at < from->end; shift += 7) {
        const unsigned char byte = *from->at++;
        *value |= shift < 64 ? (uint64_t)(byte & 0x7F) << shift : 0;
        if (byte < 0x80) {
            return true;
        }
    }
    return false;
}

/* Read the next field. `content` is empty unless the field is length-delimited. */
static bool read_field(bytes *from, uint64_t *number, bytes *content) {
    uint64_t key;
    uint64_t size = 0;
    if (!read_varint(from, &key)) {
        return false;
    }
    *number = key >> 3;
    *content = (bytes){from->at, from->at};
    switch (key & 7) {
        case 0: return read_varint(from, &size);
        case 1: size = 8; break;
        case 2:
            if (!read_varint(from, &size)) {
                return false;
            }
            break;
        case 5: size = 4; break;
        default: return false;
    }
    if (size > (uint64_t)(from->end - from->at)) {
        return false;
    }
    if ((key & 7) == 2) {
        *content = (bytes){from->at, from->at + size};
    }
    from->at += size;
    return true;
}

static bool is_text(bytes content, const char *text) {
    const size_t length = strlen(text);
    return (size_t)(content.end - content.at) == length && memcmp(content.at, text, length) == 0;
}

/* Read the decimal digits of a size; false for anything else. No digits at all are 0. */
static bool read_size(bytes content, uint64_t *value) {
    *value = 0;
    for (; content.at < content.end; content.at++) {
        if (*content.at < '0' || *content.at > '9' || *value > (uint64_t)INT64_MAX / 16) {
            return false;
        }
        *value = *value * 10 + (uint64_t)(*content.at - '0');
    }
    return true;
}

static bool read_entry(bytes from, place *found) {
    bytes key = {NULL, NULL};
    bytes value = {NULL, NULL};
    while (from.at < from.end) {
        uint64_t number;
        bytes content;
        if (!read_field(&from, &number, &content)) {
            return false;
        }
        if (number == 1) {
            key = content;
        } else if (number == 2) {
            value = content;
        }
    }
    if (key.at == NULL) {
        return true;
    }
    if (is_text(key, "location")) {
        found->location = value;
    } else if (is_text(key, "offset")) {
        found->offset = value;
    } else if (is_text(key, "length")) {
        found->length = value;
    }
    return true;
}

static tfx_status check_place(const context *c, const place *found) {
    uint64_t offset;
    uint64_t length;
    const int shown =
        (int)(found->location.end - found->location.at > 255 ? 255 : found->location.end - found->location.at);
    const char *name = shown == 0 ? "" : (const char *)found->location.at;
    for (size_t i = 0; i < c->manifest->file_count; i++) {
        const tfx_file *file = &c->manifest->files[i];
        if (!is_text(found->location, file->name)) {
            continue;
        }
        if (!read_size(found->offset, &offset) || !read_size(found->length, &length)) {
            return no_onnx(c);
        }
        if (offset + length > (uint64_t)file->bytes) {
            return tfx_fail(c->error, TFX_INPUT,
                            "%s: found %lld bytes, wanted at least %llu, where a weight of %s ends", file->name,
                            (long long)file->bytes, (unsigned long long)(offset + length), c->path);
        }
        return TFX_OK;
    }
    return tfx_fail(c->error, TFX_INPUT, "%s: external data \"%.*s\" is not among the files", c->path, shown, name);
}

static message inner_message(message owner, uint64_t field) {
    for (size_t i = 0; i < sizeof FIELDS / sizeof FIELDS[0]; i++) {
        if (FIELDS[i].owner == owner && FIELDS[i].field == field) {
            return FIELDS[i].inner;
        }
    }
    return NONE;
}

static tfx_status walk(const context *c, message kind, bytes from, int depth) {
    place found = {{NULL, NULL}, {NULL, NULL}, {NULL, NULL}};
    while (from.at < from.end) {
        uint64_t number;
        bytes content;
        if (depth > DEEPEST || !read_field(&from, &number, &content)) {
            return no_onnx(c);
        }
        const message inner = inner_message(kind, number);
        if (inner == ENTRY) {
            if (!read_entry(content, &found)) {
                return no_onnx(c);
            }
        } else if (inner != NONE) {
            TFX_TRY(walk(c, inner, content, depth + 1));
        }
    }
    return found.location.at == NULL ? TFX_OK : check_place(c, &found);
}

tfx_status tfx_external_check(const char *path, const tfx_manifest *manifest, tfx_error *error) {
    const context c = {path, manifest, error};
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    struct stat found;
    if (descriptor < 0 || fstat(descriptor, &found) != 0) {
        const tfx_status status = tfx_fail(error, TFX_INPUT, "%s: cannot be read: %s", path, strerror(errno));
        if (descriptor >= 0) {
            close(descriptor);
        }
        return status;
    }
    const size_t size = (size_t)found.st_size;
    void *content = size == 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    const int reason = errno;
    close(descriptor);
    if (content == MAP_FAILED) {
        return size == 0 ? no_onnx(&c)
                         : tfx_fail(error, TFX_MACHINE, "%s: cannot be mapped: %s", path, strerror(reason));
    }
    const unsigned char *start = content;
    const tfx_status status = walk(&c, MODEL, (bytes){start, start + size}, 0);
    munmap(content, size);
    return status;
}
