// Classes and costs of a piece's words: what encoder and decoder both sum. An Isa supplies the wide loops:
// diff, block_sums and group_prefix (16-bit words), accumulate and scramble (the hash).
#pragma once

#include <algorithm>
#include <cstring>

#include "chunk.hpp"
#include "model.hpp"

namespace thinwire {

namespace {  // one copy per instruction set: the linker must not merge them

// Small enough that a piece and its copy stay in the first-level cache while they are summed, coded and hashed.
inline constexpr size_t kPieceBlocks = 16;
inline constexpr size_t kPieceElements = kPieceBlocks * kBlockElements;
// How far ahead of the comparison memory is asked for: hardware stops at each page, and waits during the hashes.
inline constexpr size_t kPrefetchBytes = 2048;
// Blocks looked at to choose the shift of a chunk's rates.
inline constexpr size_t kSampledBlocks = 128;

template <class W>
TW_INLINE uint32_t field_of(W word, const Layout& layout) {
  return static_cast<uint32_t>(word >> layout.field_shift) & layout.field_mask;
}

// Adds to four rows of counts by field: four, so that equal neighbours do not wait for each other.
template <class W>
TW_INLINE void count_fields(const W* base, size_t count, const Layout& layout, uint32_t (*rows)[kFieldCountMax]) {
  size_t i = 0;
  for (; i + 4 <= count; i += 4) {
    rows[0][field_of(base[i], layout)] += 1;
    rows[1][field_of(base[i + 1], layout)] += 1;
    rows[2][field_of(base[i + 2], layout)] += 1;
    rows[3][field_of(base[i + 3], layout)] += 1;
  }
  for (; i < count; ++i) rows[0][field_of(base[i], layout)] += 1;
}

template <class W>
TW_INLINE uint32_t cost_of(W word, const Layout& layout, const Costs& costs) {
  // Only F64 has a field of more than a byte.
  if constexpr (sizeof(W) < 8) return costs.by_field[field_of(word, layout) & 255];
  return costs.cost[class_of_field(field_of(word, layout), costs.top)];
}

template <class W>
TW_INLINE uint32_t sum_costs(const W* base, size_t count, const Layout& layout, const Costs& costs) {
  uint32_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum += cost_of(base[i], layout, costs);
  return sum;
}

// Asks for the block that lies one piece ahead: hardware stops at each page, and the coder leaves memory idle.
template <class W>
TW_INLINE void prefetch_ahead(const W* block) {
  const auto* bytes = reinterpret_cast<const char*>(block + kPieceElements);
  for (size_t i = 0; i < kBlockElements * sizeof(W); i += 64) __builtin_prefetch(bytes + i);
}

template <class W>
TW_INLINE void prefetch_ahead_for_write(W* block) {
  auto* bytes = reinterpret_cast<char*>(block + kPieceElements);
  for (size_t i = 0; i < kBlockElements * sizeof(W); i += 64) __builtin_prefetch(bytes + i, 1);
}

// The cost of each block of a piece; the last block may be short.
template <class Isa, class W>
TW_INLINE void piece_sums(const W* base, size_t count, const Layout& layout, const Costs& costs, uint32_t* sums) {
  const size_t whole = count / kBlockElements;
  if constexpr (sizeof(W) == 2) {
    Isa::block_sums(reinterpret_cast<const uint16_t*>(base), whole, layout, costs, sums);
  } else {
    for (size_t b = 0; b < whole; ++b) sums[b] = sum_costs(base + b * kBlockElements, kBlockElements, layout, costs);
  }
  if (count % kBlockElements) {
    sums[whole] = sum_costs(base + whole * kBlockElements, count % kBlockElements, layout, costs);
  }
}

// A block that changed: the cost before each of its groups of eight.
template <class Isa, class W>
struct BlockCosts {
  static constexpr uint32_t kBeyond = 0xFFFFFFFF;  // groups that a short block lacks
  uint32_t before_group[kGroupsPerBlock + 1];
  typename Isa::Prefix prefix;  // before_group[1] to [16], in a register where there is one

  TW_INLINE BlockCosts(const W* base, size_t count, const Layout& layout, const Costs& costs) {
    before_group[0] = 0;
    if (sizeof(W) == 2 && count == kBlockElements) {
      prefix = Isa::group_prefix(reinterpret_cast<const uint16_t*>(base), layout, costs, before_group + 1);
      return;
    }
    for (size_t g = 0; g < kGroupsPerBlock; ++g) {
      const size_t first = g * kGroupElements;
      before_group[g + 1] =
          first < count
              ? before_group[g] + sum_costs(base + first, std::min(kGroupElements, count - first), layout, costs)
              : kBeyond;
    }
    prefix = Isa::load_prefix(before_group + 1);
  }

  // The group in which the cost passes `reach`.
  TW_INLINE size_t group_at(uint32_t reach) const {
    const size_t passed = Isa::count_at_most(prefix, reach);
    return passed < kGroupsPerBlock ? passed : kGroupsPerBlock - 1;
  }
};

}  // namespace

}  // namespace thinwire
