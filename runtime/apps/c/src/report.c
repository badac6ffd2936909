/* The self-check's report, for people and for programs. */
#include <math.h>
#include <string.h>

#include "print.h"

static const struct {
    const char *stage;
    const char *what;
    bool numbers;
} WHAT[] = {
    {"files", "files", false},    {"runtime", "session", false}, {"tokens", "texts", false},
    {"outputs", "outputs", true}, {"vectors", "texts", true},
};

static size_t what_of(const char *stage) {
    size_t i = 0;
    while (i + 1 < sizeof WHAT / sizeof WHAT[0] && strcmp(WHAT[i].stage, stage) != 0) {
        i++;
    }
    return i;
}

/* Print a number in three digits, or a word where there is none. */
static void print_short(FILE *file, double value, const char *otherwise) {
    if (isnan(value)) {
        fputs(otherwise, file);
    } else {
        fprintf(file, "%.3g", value);
    }
}

static void print_bound(FILE *file, double value) {
    if (isnan(value)) {
        fputs("any", file);
    } else {
        fprintf(file, "%g", value);
    }
}

static void print_cosine(FILE *file, double value) {
    if (isnan(value)) {
        fputs("none", file);
    } else {
        fprintf(file, "%.8f", value);
    }
}

static void print_stage(FILE *file, const tfx_report *report, const tfx_stage *stage) {
    const size_t what = what_of(stage->name);
    fprintf(file, "%-8s %s  ", stage->name, stage->passed ? "passed" : "FAILED");
    if (strcmp(stage->name, "runtime") == 0) {
        fprintf(file, "%s, %s, %s", report->runtime[0] != '\0' ? report->runtime : "none",
                report->provider[0] != '\0' ? report->provider : "nothing runs", report->library);
    } else {
        fprintf(file, "%zu %s", stage->checked, WHAT[what].what);
    }
    if (WHAT[what].numbers && stage->checked > 0) {
        fputs(", max abs ", file);
        print_short(file, stage->max_abs, "none");
        fputs(", min cosine ", file);
        print_cosine(file, stage->min_cosine);
    }
    fputc('\n', file);
}

/* How much was needed and how much was allowed, and the two variances. */
static void print_needed(FILE *file, const tfx_report *report) {
    fputs("max abs ", file);
    print_short(file, report->max_abs, "none");
    fputs(" (allowed ", file);
    print_bound(file, report->tolerance_max_abs);
    fputs("), cosine ", file);
    print_cosine(file, report->min_cosine);
    fputs(" (wanted ", file);
    print_bound(file, report->tolerance_min_cosine);
    if (!isnan(report->tolerance_min_token_cosine)) {
        fprintf(file, ", %g of single tokens", report->tolerance_min_token_cosine);
    }
    fputs("); batch variance ", file);
    print_short(file, report->batch_variance, "none");
    fputs(" (promised ", file);
    print_short(file, report->promised_batch_variance, "none");
    fputc(')', file);
}

void tfx_report_print(const tfx_report *report, FILE *file) {
    for (size_t i = 0; i < report->stage_count; i++) {
        print_stage(file, report, &report->stages[i]);
    }
    if (report->passed) {
        fprintf(file, "self-check passed: %s, ", report->precision);
        print_needed(file, report);
        fputc('\n', file);
    } else {
        fprintf(file, "self-check failed%s%s: %s\n", report->failed == NULL ? "" : " at ",
                report->failed == NULL ? "" : report->failed, report->problem);
    }
}

/* Print ,"key":"text", or null for an empty text. */
static void print_member(FILE *file, const char *key, const char *text) {
    fprintf(file, ",\"%s\":", key);
    if (text == NULL || text[0] == '\0') {
        fputs("null", file);
    } else {
        tfx_print_text(file, text);
    }
}

static void print_number_member(FILE *file, const char *key, double value) {
    fprintf(file, ",\"%s\":", key);
    tfx_print_number(file, value);
}

void tfx_report_json(const tfx_report *report, FILE *file) {
    fputs("{\"app\":", file);
    tfx_print_text(file, report->app);
    fprintf(file, ",\"passed\":%s", report->passed ? "true" : "false");
    print_member(file, "stage", report->failed);
    print_member(file, "problem", report->problem);
    print_member(file, "runtime", report->runtime);
    print_member(file, "library", report->library);
    print_member(file, "provider", report->provider);
    print_member(file, "precision", report->precision);
    print_member(file, "target", report->target);
    print_member(file, "layout", report->layout);
    print_number_member(file, "max_abs", report->max_abs);
    print_number_member(file, "min_cosine", report->min_cosine);
    fputs(",\"stages\":[", file);
    for (size_t i = 0; i < report->stage_count; i++) {
        const tfx_stage *stage = &report->stages[i];
        fprintf(file, "%s{\"stage\":\"%s\",\"passed\":%s,\"checked\":%zu", i == 0 ? "" : ",", stage->name,
                stage->passed ? "true" : "false", stage->checked);
        if (WHAT[what_of(stage->name)].numbers) {
            print_number_member(file, "max_abs", stage->max_abs);
            print_number_member(file, "min_cosine", stage->min_cosine);
        }
        fputc('}', file);
    }
    fputc(']', file);
    print_number_member(file, "batch_variance", report->batch_variance);
    print_number_member(file, "promised_batch_variance", report->promised_batch_variance);
    fputs("}\n", file);
}
