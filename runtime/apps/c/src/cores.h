/* How many cores there are for us. */
#ifndef TFX_CORES_H
#define TFX_CORES_H

/*
 * Return the number of physical cores that this process may use, at least 1. A container's share of CPU time counts
 * too: more threads than it allows would only be stopped by the kernel.
 */
long tfx_usable_cores(void);

#endif
