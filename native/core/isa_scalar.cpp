#include "kernels.hpp"

namespace thinwire {

namespace {

struct Scalar {
  template <class W>
  static size_t diff(const W* base, const W* changed, size_t count, uint32_t start, uint32_t* positions) {
    size_t found = 0;
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
      if (std::memcmp(base + i, changed + i, 64 * sizeof(W)) == 0) continue;
      for (size_t j = i; j < i + 64; ++j) {
        positions[found] = start + static_cast<uint32_t>(j);
        found += base[j] != changed[j];
      }
    }
    for (; i < count; ++i) {
      if (base[i] != changed[i]) positions[found++] = start + static_cast<uint32_t>(i);
    }
    return found;
  }

  static void block_sums(const uint16_t* base, size_t blocks, const Layout& layout, const Costs& costs,
                         uint32_t* sums) {
    for (size_t b = 0; b < blocks; ++b) sums[b] = sum_costs(base + b * kBlockElements, kBlockElements, layout, costs);
  }

  using Prefix = const uint32_t*;

  static Prefix load_prefix(const uint32_t* before) { return before; }

  static Prefix group_prefix(const uint16_t* base, const Layout& layout, const Costs& costs, uint32_t* before) {
    uint32_t sum = 0;
    for (size_t g = 0; g < kGroupsPerBlock; ++g)
      before[g] = sum += sum_costs(base + g * kGroupElements, kGroupElements, layout, costs);
    return before;
  }

  static size_t count_at_most(Prefix prefix, uint32_t reach) {
    size_t count = 0;
    for (size_t g = 0; g < kGroupsPerBlock; ++g) count += prefix[g] <= reach;
    return count;
  }

  static void accumulate(uint64_t* acc, const uint8_t* data, const uint8_t* secret, size_t stripes) {
    for (size_t s = 0; s < stripes; ++s) {
      for (int i = 0; i < 8; ++i) {
        const uint64_t value = load64(data + s * kStripeBytes + 8 * i);
        const uint64_t keyed = value ^ load64(secret + s * 8 + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
      }
    }
  }

  static void scramble(uint64_t* acc, const uint8_t* secret) {
    for (int i = 0; i < 8; ++i) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ load64(secret + 8 * i)) * kPrime32_1;
  }
};

}  // namespace

const Kernels kScalarKernels = {"scalar",        encode_any<Scalar>,       decode_any<Scalar>,
                                xxh3_64<Scalar>, find_changes_any<Scalar>, find_rounded_changes<Scalar>};

}  // namespace thinwire
