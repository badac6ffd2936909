/* Asks the C library for POSIX and for dladdr and sched_getaffinity; included before anything else. */
#ifndef TFX_PLATFORM_H
#define TFX_PLATFORM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#ifndef _DARWIN_C_SOURCE
#define _DARWIN_C_SOURCE
#endif
#define _FILE_OFFSET_BITS 64

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bundles hold little-endian numbers, which this code reads as they lie"
#endif

#endif
