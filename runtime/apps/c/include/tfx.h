/*
 * tfx.h: texts to vectors, from a bundle that `tfx export` made, through any onnxruntime >= 1.20.
 *
 * Every function that can fail returns a tfx_status and, unless `error` is NULL, writes one line that names the
 * thing, what was found and what was wanted. On failure results are left empty: freeing them is allowed and does
 * nothing. Results own their memory and need neither the encoder nor the inputs any more. There is no global state.
 * One encoder may be used by several threads at once; opening and closing it may not overlap with its use.
 */
#ifndef TFX_H
#define TFX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TFX_MAX_RANK 8

/* What happened; the values are the exit codes of the command line. */
typedef enum tfx_status {
    TFX_OK = 0,
    TFX_CHECK = 1,  /* a check ran to its end and did not pass */
    TFX_INPUT = 2,  /* bad use, bad input, or a damaged bundle */
    TFX_MACHINE = 3 /* this machine cannot: onnxruntime is missing or too old, no memory */
} tfx_status;

/* One printable line of UTF-8, without a line break at its end. */
typedef struct tfx_error {
    char message[1024];
} tfx_error;

/* All zero means the defaults, as does a NULL pointer to it. */
typedef struct tfx_options {
    const char *library; /* path of the onnxruntime library; NULL: $TFX_ONNXRUNTIME, else the loader's own search */
    int threads;         /* threads inside an operator; 0: what the bundle was tuned to, else onnxruntime's choice */
} tfx_options;

typedef enum tfx_dtype {
    TFX_BOOL = 1, /* one byte, 0 or 1 */
    TFX_INT8,
    TFX_INT16,
    TFX_INT32,
    TFX_INT64,
    TFX_UINT8,
    TFX_UINT16,
    TFX_UINT32,
    TFX_UINT64,
    TFX_FLOAT16, /* IEEE 754 binary16, as uint16_t */
    TFX_FLOAT32,
    TFX_FLOAT64
} tfx_dtype;

/* Bytes of one value, 0 for a value that is no tfx_dtype. */
size_t tfx_dtype_size(tfx_dtype dtype);

/* A name as the manifest writes it ("int64", "float32"), NULL for a value that is no tfx_dtype. */
const char *tfx_dtype_name(tfx_dtype dtype);

/*
 * A dense array, row by row. As a result it owns `name` and `data` (tfx_tensor_free releases both); as an input it
 * borrows both from the caller, who keeps them valid during the call, and nothing is written to them.
 */
typedef struct tfx_tensor {
    const char *name;
    tfx_dtype dtype;
    size_t rank;                 /* at most TFX_MAX_RANK */
    int64_t shape[TFX_MAX_RANK]; /* the first `rank` count */
    void *data;                  /* the product of the shape, values of `dtype` */
} tfx_tensor;

/* Number of values: the product of the shape. */
size_t tfx_tensor_size(const tfx_tensor *tensor);

/* Release what a result owns and set all of it to zero; NULL and an empty tensor are allowed. */
void tfx_tensor_free(tfx_tensor *tensor);

/* Named arrays, in the manifest's order. */
typedef struct tfx_outputs {
    tfx_tensor *items;
    size_t count;
} tfx_outputs;

/* Return the output of this name, NULL where there is none; it stays owned by `outputs`. */
const tfx_tensor *tfx_outputs_find(const tfx_outputs *outputs, const char *name);

void tfx_outputs_free(tfx_outputs *outputs);

/* The tokens of one text, special tokens among them, not padded. */
typedef struct tfx_tokens {
    int64_t *ids;   /* (count) */
    int64_t *types; /* (count) segment ids */
    size_t count;
    size_t dropped; /* tokens that the longest the model takes left out; 0: the text is whole */
} tfx_tokens;

void tfx_tokens_free(tfx_tokens *tokens);

/* One input or output of the model. */
typedef struct tfx_spec {
    const char *name;
    const char *role; /* of inputs: "token_ids", "attention_mask", ... as the manifest has it; of outputs: "output" */
    tfx_dtype dtype;  /* of the graph; float16 outputs are handed over as float32 */
    size_t rank;
    int64_t shape[TFX_MAX_RANK];    /* a size, or -1 where the axis has a name */
    const char *axes[TFX_MAX_RANK]; /* the axis' name ("batch", "sequence"), NULL where it has a size */
    int64_t limit;                  /* exclusive upper bound of integer values, 0 where none is known */
} tfx_spec;

/* A loaded bundle. */
typedef struct tfx_encoder tfx_encoder;

/* What was loaded; all pointers are owned by the encoder. */
typedef struct tfx_info {
    const char *runtime;   /* "onnxruntime 1.31.1" */
    const char *library;   /* path of its library */
    const char *provider;  /* "cpu" */
    const char *precision; /* "fp32", "int8", ... */
    const char *target;
    const char *layout; /* "padded" or "ragged" */
    int64_t max_length; /* longest sequence in tokens that texts are cut to, -1 for no limit */
    int64_t pad_id;     /* token id that pads a batch */
    int64_t dimension;  /* values of one vector, 0 without pooling or where the manifest does not say */
    const char *pooled; /* name of the output with one vector per text, NULL without pooling */
    bool tokenizer;     /* whether the bundle takes text */
    const tfx_spec *inputs;
    size_t input_count;
    const tfx_spec *outputs;
    size_t output_count;
} tfx_info;

/* The version of this code, "0.1.0". */
const char *tfx_version(void);

/*
 * Load a bundle: every file's size and sha256 is checked, onnxruntime is loaded and its version checked, the session
 * is created from the model's path (so weights beside it are found wherever the folder is moved).
 *
 * bundle:  the folder.
 * options: NULL for the defaults.
 * encoder: receives the encoder, NULL on failure; released with tfx_close.
 *
 * TFX_INPUT: no bundle, or a file is missing, short or altered. TFX_MACHINE: onnxruntime is missing or too old (the
 * message has the wanted and the found API version and the path), or no memory.
 */
tfx_status tfx_open(const char *bundle, const tfx_options *options, tfx_encoder **encoder, tfx_error *error);

/* Release an encoder; NULL is allowed. */
void tfx_close(tfx_encoder *encoder);

/* What was loaded; valid until tfx_close. */
const tfx_info *tfx_get_info(const tfx_encoder *encoder);

/*
 * Tokenize one text as tokenizer.json says, cut to the longest that tokenizer and model take.
 *
 * text:   UTF-8, ended by NUL.
 * tokens: receives the tokens; released with tfx_tokens_free.
 *
 * TFX_INPUT: no tokenizer in the bundle, invalid UTF-8, a text without tokens, or one whose tokens are not certain to
 * be those of the tokenizer that the model was trained with.
 */
tfx_status tfx_tokenize(tfx_encoder *encoder, const char *text, tfx_tokens *tokens, tfx_error *error);

/*
 * One vector per text, in the order given. Texts of like length share a batch of at most 32 rows, padded with the
 * model's pad id and a zero mask.
 *
 * texts:   `count` strings, at least one.
 * vectors: receives float32 (count, d); released with tfx_tensor_free.
 *
 * TFX_INPUT: as tfx_tokenize, for any of the texts; the message says which, counted from 0. An empty list. A bundle
 * without pooling (tfx_run_texts takes it).
 */
tfx_status tfx_embed(tfx_encoder *encoder, const char *const *texts, size_t count, tfx_tensor *vectors,
                     tfx_error *error);

/*
 * Every output of the model for each text, batched as tfx_embed does.
 *
 * results: `count` elements, given by the caller; element i receives the outputs of text i without the batch axis and
 *          cut to the text's own length ((tokens, d) for token vectors, (d) for a pooled one). Each is released with
 *          tfx_outputs_free. On failure all are empty.
 *
 * TFX_INPUT: as tfx_embed.
 */
tfx_status tfx_run_texts(tfx_encoder *encoder, const char *const *texts, size_t count, tfx_outputs *results,
                         tfx_error *error);

/*
 * The same for texts that tfx_tokenize has taken already; nothing is tokenized twice.
 *
 * tokens: of `count` texts, at least one; they stay the caller's.
 *
 * TFX_INPUT: an empty list, a text without tokens, or what tfx_run refuses. A bundle without pooling
 * (tfx_embed_tokens).
 */
tfx_status tfx_embed_tokens(tfx_encoder *encoder, const tfx_tokens *tokens, size_t count, tfx_tensor *vectors,
                            tfx_error *error);
tfx_status tfx_run_tokens(tfx_encoder *encoder, const tfx_tokens *tokens, size_t count, tfx_outputs *results,
                          tfx_error *error);

/*
 * Run the model once on arrays. Integers are cast where nothing is lost (int32 to int64 and back); a missing mask
 * attends everywhere and is an error where ids begin or end with the pad id; missing segment ids are zeros.
 *
 * inputs:  `count` named arrays, (batch, sequence) for ids and masks.
 * outputs: receives every output, float16 as float32; released with tfx_outputs_free.
 *
 * TFX_INPUT: an unknown or repeated name, or a wrong dtype, rank, size, range or length; the message says the input,
 * found and wanted. TFX_MACHINE: no memory.
 */
tfx_status tfx_run(tfx_encoder *encoder, const tfx_tensor *inputs, size_t count, tfx_outputs *outputs,
                   tfx_error *error);

/* One stage of the self-check. */
typedef struct tfx_stage {
    const char *name; /* "files", "runtime", "tokens", "outputs", "vectors" */
    bool passed;
    size_t checked;    /* how many things were compared; 0 where there was nothing to do */
    double max_abs;    /* largest difference, NaN where it cannot be said or the stage compares no numbers */
    double min_cosine; /* smallest cosine, likewise */
} tfx_stage;

#define TFX_STAGES 5

/* What the self-check found; owns nothing that must be released. Numbers that cannot be said are NaN. */
typedef struct tfx_report {
    char app[16]; /* "c"; a caller in another language may write its own */
    bool passed;
    const char *failed; /* the first stage that failed, NULL where none did */
    char problem[1024]; /* why, one line; empty where nothing failed */
    char runtime[64];   /* "onnxruntime 1.31.1"; these strings are empty where unknown */
    char library[1024];
    char provider[16];
    char precision[32];
    char target[32];
    char layout[32];
    double max_abs;                    /* worst over outputs and vectors */
    double min_cosine;                 /* worst over outputs and vectors */
    double tolerance_max_abs;          /* allowed; NaN for any */
    double tolerance_min_cosine;       /* wanted; NaN for any */
    double tolerance_min_token_cosine; /* wanted of single tokens; NaN where it is the one above */
    tfx_stage stages[TFX_STAGES];
    size_t stage_count;             /* stages that ran */
    double batch_variance;          /* largest difference of a text's vector run alone and beside others */
    double promised_batch_variance; /* the manifest's */
} tfx_report;

/*
 * Check a bundle against what was recorded when it was made: its files, the runtime, the tokens of the recorded
 * texts, the model's outputs and the texts' vectors, in this order; the first stage that fails ends it.
 *
 * report: filled in whatever is returned.
 *
 * TFX_OK: all passed. TFX_CHECK: a stage failed. TFX_INPUT: no bundle, or no readable manifest. TFX_MACHINE:
 * onnxruntime is missing or too old, or no memory. `error` has what report->problem has.
 */
tfx_status tfx_self_check(const char *bundle, const tfx_options *options, tfx_report *report, tfx_error *error);

/* Print a report for people: a line per stage and one with the verdict. */
void tfx_report_print(const tfx_report *report, FILE *file);

/* Print a report as one line of JSON. */
void tfx_report_json(const tfx_report *report, FILE *file);

#ifdef __cplusplus
}
#endif

#endif
