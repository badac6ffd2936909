#include "platform.h"

#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHUNK ((size_t)1 << 20)

char *tfx_path(const char *folder, const char *name) {
    const size_t length = strlen(folder) + strlen(name) + 2;
    char *path = malloc(length);
    if (path != NULL) {
        snprintf(path, length, "%s/%s", folder, name);
    }
    return path;
}

char *tfx_copy_text(const char *text) {
    const size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    return copy == NULL ? NULL : memcpy(copy, text, bytes);
}

static tfx_status unreadable(const char *path, tfx_error *error) {
    const char *reason = errno == ENOENT ? "found nothing, wanted a file" : strerror(errno);
    return tfx_fail(error, TFX_INPUT, "%s: %s", path, reason);
}

/* Open a regular file for reading; a pipe would keep us waiting for ever. */
static tfx_status open_file(const char *path, int *descriptor, off_t *size, tfx_error *error) {
    *descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (*descriptor < 0) {
        return unreadable(path, error);
    }
    struct stat found;
    if (fstat(*descriptor, &found) != 0 || !S_ISREG(found.st_mode)) {
        close(*descriptor);
        return tfx_fail(error, TFX_INPUT, "%s: found no file, wanted one", path);
    }
    *size = found.st_size;
    return TFX_OK;
}

/* read() that goes on after a signal; returns -1 with errno set on failure. */
static ssize_t read_some(int descriptor, void *buffer, size_t bytes) {
    ssize_t count;
    do {
        count = read(descriptor, buffer, bytes);
    } while (count < 0 && errno == EINTR);
    return count;
}

static tfx_status read_whole(int descriptor, const char *path, char *content, size_t size, tfx_error *error) {
    for (size_t done = 0; done < size;) {
        const ssize_t count = read_some(descriptor, content + done, size - done);
        if (count < 0) {
            return unreadable(path, error);
        }
        if (count == 0) {
            return tfx_fail(error, TFX_INPUT, "%s: found %zu bytes, wanted %zu", path, done, size);
        }
        done += (size_t)count;
    }
    return TFX_OK;
}

tfx_status tfx_read_file(const char *path, size_t largest, char **content, size_t *size, tfx_error *error) {
    *content = NULL;
    *size = 0;
    int descriptor;
    off_t found;
    TFX_TRY(open_file(path, &descriptor, &found, error));
    tfx_status status = TFX_OK;
    if ((uintmax_t)found > largest) {
        status = tfx_fail(error, TFX_INPUT, "%s: found %jd bytes, wanted at most %zu", path, (intmax_t)found, largest);
    } else if ((*content = malloc((size_t)found + 1)) == NULL) {
        status = tfx_no_memory(error);
    } else {
        status = read_whole(descriptor, path, *content, (size_t)found, error);
    }
    close(descriptor);
    if (status != TFX_OK) {
        free(*content);
        *content = NULL;
        return status;
    }
    *size = (size_t)found;
    (*content)[*size] = '\0';
    return TFX_OK;
}

/* Hash what is left of a file. Returns -1 where reading fails (errno is set), -2 where OpenSSL does. */
static int hash_stream(int descriptor, EVP_MD_CTX *context, void *chunk, unsigned char *digest, int64_t *size) {
    if (EVP_DigestInit_ex(context, EVP_sha256(), NULL) != 1) {
        return -2;
    }
    ssize_t count;
    while ((count = read_some(descriptor, chunk, CHUNK)) > 0) {
        *size += count;
        if (EVP_DigestUpdate(context, chunk, (size_t)count) != 1) {
            return -2;
        }
    }
    if (count < 0) {
        return -1;
    }
    return EVP_DigestFinal_ex(context, digest, NULL) == 1 ? 0 : -2;
}

tfx_status tfx_sha256_file(const char *path, char digest[TFX_SHA256_DIGITS + 1], int64_t *size, tfx_error *error) {
    *size = 0;
    int descriptor;
    off_t found;
    TFX_TRY(open_file(path, &descriptor, &found, error));
    void *chunk = malloc(CHUNK);
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    unsigned char bytes[EVP_MAX_MD_SIZE];
    tfx_status status = TFX_OK;
    if (chunk == NULL || context == NULL) {
        status = tfx_no_memory(error);
    } else {
        const int result = hash_stream(descriptor, context, chunk, bytes, size);
        if (result == -1) {
            status = unreadable(path, error);
        } else if (result != 0) {
            status = tfx_fail(error, TFX_MACHINE, "%s: OpenSSL cannot compute a sha256 here", path);
        }
    }
    EVP_MD_CTX_free(context);
    free(chunk);
    close(descriptor);
    for (size_t i = 0; status == TFX_OK && i < TFX_SHA256_DIGITS / 2; i++) {
        snprintf(digest + 2 * i, 3, "%02x", (unsigned)bytes[i]);
    }
    return status;
}

/* Length of the valid character at the beginning of `bytes` > 0 bytes, 0 where there is none (Unicode, table 3-7). */
static size_t character(const unsigned char *text, size_t bytes) {
    const unsigned char first = text[0];
    if (first < 0x80) {
        return 1;
    }
    const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4 || length > bytes) {
        return 0;
    }
    const unsigned char lowest = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
    const unsigned char highest = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF; /* no surrogates, <= U+10FFFF */
    if (text[1] < lowest || text[1] > highest) {
        return 0;
    }
    for (size_t i = 2; i < length; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    return length;
}

size_t tfx_utf8_check(const char *text, size_t bytes) {
    const unsigned char *at = (const unsigned char *)text;
    size_t place = 0;
    while (place < bytes) {
        const size_t length = character(at + place, bytes - place);
        if (length == 0) {
            break;
        }
        place += length;
    }
    return place;
}
