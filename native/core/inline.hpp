// Kernels are compiled once per instruction set, in anonymous namespaces. What they share must be inlined into each
// of them: an out-of-line copy could be the one that the linker took from the AVX-512 file.
#pragma once

#define TW_INLINE inline __attribute__((always_inline))
