#include "platform.h"

#include "cores.h"

#include <stdbool.h>
#include <stdio.h>
#include <unistd.h>

#ifdef __linux__
#include <sched.h>

/* Read up to two numbers from a file; returns how many there are. */
static int read_numbers(const char *path, long *first, long *second) {
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return 0;
    }
    const int count = fscanf(file, "%ld %ld", first, second);
    fclose(file);
    return count < 0 ? 0 : count;
}

/* Cores that the control group (version 2, then 1) grants, rounded up; 0 for all. */
static long quota(void) {
    long granted = 0;
    long period = 0;
    long unused = 0;
    if (read_numbers("/sys/fs/cgroup/cpu.max", &granted, &period) != 2 &&
        (read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &granted, &unused) < 1 ||
         read_numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period, &unused) < 1)) {
        return 0;
    }
    return granted > 0 && period > 0 ? (granted + period - 1) / period : 0;
}

/* Physical cores among the first `logical` ones: those that are the first of the threads they share a core with. */
static long physical(long logical) {
    long count = 0;
    for (long i = 0; i < logical; i++) {
        char path[96];
        long first = -1;
        long second = 0;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%ld/topology/thread_siblings_list", i);
        if (read_numbers(path, &first, &second) >= 1 && first == i) {
            count++;
        }
    }
    return count;
}
#else
static long quota(void) {
    return 0;
}

static long physical(long logical) {
    return logical;
}
#endif

long tfx_usable_cores(void) {
    const long logical = sysconf(_SC_NPROCESSORS_ONLN);
    long usable = logical < 1 ? 1 : logical;
    const long limits[] = {physical(usable), quota()};
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0 && CPU_COUNT(&set) < usable) {
        usable = CPU_COUNT(&set);
    }
#endif
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        if (limits[i] > 0 && limits[i] < usable) {
            usable = limits[i];
        }
    }
    return usable;
}
