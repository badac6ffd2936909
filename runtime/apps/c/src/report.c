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

static void print_needed(FILE *file, double max_abs, double allowed, double min_cosine, double wanted) {
    fprintf(file, "max abs %.3g (allowed ", max_abs);
    isnan(allowed) ? fputs("any", file) : fprintf(file, "%g", allowed);
    fprintf(file, "), cosine %.8f (wanted ", min_cosine);
    isnan(wanted) ? fputs("any", file) : fprintf(file, "%g", wanted);
    fputc(')', file);
}

static void print_stage(FILE *file, const tfx_report *report, const tfx_stage *stage) {
    const size_t what = what_of(stage->name);
    fprintf(file, "%-8s %s  ", stage->name, stage->passed ? "passed" : "FAILED");
    if (stage->passed && stage->checked == 0) {
        fputs("nothing to do", file);
    } else if (strcmp(stage->name, "runtime") == 0) {
        fprintf(file, "%s in %s, on %s", report->runtime[0] != '\0' ? report->runtime : "no onnxruntime",
                report->library, report->provider[0] != '\0' ? report->provider : "nothing");
    } else {
        fprintf(file, "%zu %s", stage->checked, WHAT[what].what);
    }
    if (WHAT[what].numbers && stage->checked > 0) {
        fprintf(file, ": max abs %.3g, cosine %.8f", stage->max_abs, stage->min_cosine);
    }
    fputc('\n', file);
}

void tfx_report_print(const tfx_report *report, FILE *file) {
    for (size_t i = 0; i < report->stage_count; i++) {
        print_stage(file, report, &report->stages[i]);
    }
    if (!isnan(report->batch_variance)) {
        fprintf(file, "a text alone or beside others: vectors differ by up to %.3g (promised ", report->batch_variance);
        isnan(report->promised_batch_variance) ? fputs("nothing", file)
                                               : fprintf(file, "%.3g", report->promised_batch_variance);
        fputs(")\n", file);
    }
    if (!report->passed) {
        fprintf(file, "self-check failed%s%s: %s\n", report->failed == NULL ? "" : " at ",
                report->failed == NULL ? "" : report->failed, report->problem);
        return;
    }
    fprintf(file, "self-check passed: %s %s", report->precision, report->target);
    if (!isnan(report->max_abs)) {
        fputs(": ", file);
        print_needed(file, report->max_abs, report->tolerance_max_abs, report->min_cosine,
                     report->tolerance_min_cosine);
    }
    fputc('\n', file);
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
