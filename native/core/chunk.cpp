#include "chunk.hpp"

#include <algorithm>
#include <cstring>

#include "block_costs.hpp"

namespace thinwire {

// Positions, words and a copy of one piece, with the 64 bytes before it.
size_t decode_scratch_bytes() { return kPieceElements * (4 + 8 + 8) + 64; }

namespace {

template <class W>
void sample_words(const W* base, const W* changed, size_t count, const Layout& layout, size_t first, size_t stride,
                  uint64_t* counts) {
  constexpr int bits = 8 * sizeof(W);
  const size_t fields = size_t{layout.field_mask} + 1;
  uint64_t *const all = counts, *const changes = counts + fields, *const ones = counts + 2 * fields;
  uint32_t seen[4][kFieldCountMax];
  for (auto& row : seen) std::fill_n(row, fields, 0);
  for (size_t start = first * kSampleElements; start < count; start += stride * kSampleElements) {
    const size_t end = std::min(count, start + kSampleElements);
    count_fields(base + start, end - start, layout, seen);
    for (size_t i = start; i < end; ++i) {
      if (base[i] == changed[i]) continue;
      const uint32_t field = field_of(base[i], layout);
      changes[field] += 1;
      const uint64_t step =
          (to_order(changed[i], bits, layout.ordered) - to_order(base[i], bits, layout.ordered)) & word_mask(bits);
      ones[field] += step == 1 || step == word_mask(bits);
    }
  }
  for (size_t field = 0; field < fields; ++field) {
    all[field] += uint64_t{seen[0][field]} + seen[1][field] + seen[2][field] + seen[3][field];
  }
}

}  // namespace

void sample(const void* base, const void* changed, size_t count, const Layout& layout, size_t first, size_t stride,
            uint64_t* counts) {
  const auto run = [&](auto word) {
    using W = decltype(word);
    sample_words(static_cast<const W*>(base), static_cast<const W*>(changed), count, layout, first, stride, counts);
  };
  switch (layout.word_bytes) {
    case 1: return run(uint8_t{});
    case 2: return run(uint16_t{});
    case 4: return run(uint32_t{});
    default: return run(uint64_t{});
  }
}

const Kernels* kernels_named(const char* name) {
#ifdef THINWIRE_X86
  __builtin_cpu_init();
  if (std::strcmp(name, "avx512") == 0) {
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi") && kernels_named("avx2");
    return runs ? &kAvx512Kernels : nullptr;
  }
  if (std::strcmp(name, "avx2") == 0) {
    const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
    return runs ? &kAvx2Kernels : nullptr;
  }
#endif
  return std::strcmp(name, "scalar") == 0 ? &kScalarKernels : nullptr;
}

const Kernels& best_kernels() {
  for (const char* name : {"avx512", "avx2"}) {
    if (const Kernels* kernels = kernels_named(name)) return *kernels;
  }
  return kScalarKernels;
}

}  // namespace thinwire
