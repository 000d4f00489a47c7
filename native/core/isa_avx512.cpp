#include <immintrin.h>

#include "kernels.hpp"

namespace thinwire {

namespace {

struct Avx512 {
  template <class W>
  static TW_INLINE uint64_t different(__m512i a, __m512i b) {
    if constexpr (sizeof(W) == 1) return _mm512_cmpneq_epi8_mask(a, b);
    if constexpr (sizeof(W) == 2) return _mm512_cmpneq_epi16_mask(a, b);
    if constexpr (sizeof(W) == 4) return _mm512_cmpneq_epi32_mask(a, b);
    return _mm512_cmpneq_epi64_mask(a, b);
  }

  template <class W>
  static size_t diff(const W* base, const W* changed, size_t count, uint32_t start, uint32_t* positions) {
    constexpr size_t lanes = 64 / sizeof(W);
    size_t found = 0, i = 0;
    for (; i + lanes <= count; i += lanes) {
      _mm_prefetch(reinterpret_cast<const char*>(base + i) + kPrefetchBytes, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(changed + i) + kPrefetchBytes, _MM_HINT_T0);
      for (uint64_t mask = different<W>(_mm512_loadu_si512(base + i), _mm512_loadu_si512(changed + i)); mask;
           mask &= mask - 1) {
        positions[found++] = start + static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctzll(mask));
      }
    }
    for (; i < count; ++i) {
      if (base[i] != changed[i]) positions[found++] = start + static_cast<uint32_t>(i);
    }
    return found;
  }

  struct Tables {
    __m512i low, high, top, mask;
    __m128i shift;
  };

  static TW_INLINE Tables tables(const Layout& layout, const Costs& costs) {
    return {_mm512_load_si512(costs.low), _mm512_load_si512(costs.high), _mm512_set1_epi8(static_cast<char>(costs.top)),
            _mm512_set1_epi16(static_cast<int16_t>(layout.field_mask)), _mm_cvtsi32_si128(layout.field_shift)};
  }

  // Costs of 64 words, summed over groups of eight: the order of the groups is 0, 4, 1, 5, 2, 6, 3, 7.
  static TW_INLINE __m512i groups_of_64(const uint16_t* base, const Tables& t) {
    const __m512i a = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(base), t.shift), t.mask);
    const __m512i b = _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(base + 32), t.shift), t.mask);
    const __m512i cls =
        _mm512_min_epu8(_mm512_subs_epu8(t.top, _mm512_packus_epi16(a, b)), _mm512_set1_epi8(kClassCount - 1));
    const __m512i zero = _mm512_setzero_si512();
    const __m512i low = _mm512_sad_epu8(_mm512_permutexvar_epi8(cls, t.low), zero);
    const __m512i high = _mm512_sad_epu8(_mm512_permutexvar_epi8(cls, t.high), zero);
    return _mm512_add_epi64(low, _mm512_slli_epi64(high, 8));
  }

  static void block_sums(const uint16_t* base, size_t blocks, const Layout& layout, const Costs& costs,
                         uint32_t* sums) {
    const Tables t = tables(layout, costs);
    for (size_t b = 0; b < blocks; ++b) {
      const uint16_t* block = base + b * kBlockElements;
      const __m512i both = _mm512_add_epi64(groups_of_64(block, t), groups_of_64(block + 64, t));
      sums[b] = static_cast<uint32_t>(_mm512_reduce_add_epi64(both));
    }
  }

  using Prefix = __m512i;

  static TW_INLINE Prefix load_prefix(const uint32_t* before) { return _mm512_loadu_si512(before); }

  // Running sums stay in a register: reading back what scalar stores wrote would wait for them.
  static TW_INLINE Prefix group_prefix(const uint16_t* base, const Layout& layout, const Costs& costs,
                                       uint32_t* before) {
    const Tables t = tables(layout, costs);
    const __m512i order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    const __m256i first = _mm512_cvtepi64_epi32(_mm512_permutexvar_epi64(order, groups_of_64(base, t)));
    const __m256i second = _mm512_cvtepi64_epi32(_mm512_permutexvar_epi64(order, groups_of_64(base + 64, t)));
    const __m512i zero = _mm512_setzero_si512();
    __m512i sum = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 15));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
    _mm512_storeu_si512(before, sum);
    return sum;
  }

  static TW_INLINE size_t count_at_most(Prefix prefix, uint32_t reach) {
    return static_cast<size_t>(
        __builtin_popcount(_mm512_cmple_epu32_mask(prefix, _mm512_set1_epi32(static_cast<int>(reach)))));
  }

  static void accumulate(uint64_t* acc, const uint8_t* data, const uint8_t* secret, size_t stripes) {
    __m512i sum = _mm512_load_si512(acc);
    for (size_t s = 0; s < stripes; ++s) {
      const __m512i value = _mm512_loadu_si512(data + s * kStripeBytes);
      const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * s));
      const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
      sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, _mm512_shuffle_epi32(value, _MM_PERM_BADC)));
    }
    _mm512_store_si512(acc, sum);
  }

  static void scramble(uint64_t* acc, const uint8_t* secret) {
    const __m512i sum = _mm512_load_si512(acc);
    const __m512i mixed =
        _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), _mm512_loadu_si512(secret));
    _mm512_store_si512(acc, _mm512_mullo_epi64(mixed, _mm512_set1_epi64(kPrime32_1)));
  }
};

}  // namespace

const Kernels kAvx512Kernels = {"avx512",        encode_any<Avx512>,       decode_any<Avx512>,
                                xxh3_64<Avx512>, find_changes_any<Avx512>, find_rounded_changes<Avx512>};

}  // namespace thinwire
