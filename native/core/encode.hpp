// The encoder of one chunk, written once and compiled per instruction set.
#pragma once

#include "block_costs.hpp"
#include "range_coder.hpp"
#include "xxh3.hpp"

namespace thinwire {

namespace {  // one copy per instruction set: the linker must not merge them

template <class W>
TW_INLINE void encode_value(RangeEncoder& coder, ValueModel& model, const Constants& k, const Layout& layout, int cls,
                            W base, W changed) {
  constexpr int bits = 8 * sizeof(W);
  const uint64_t mask = word_mask(bits);
  const uint64_t step = (to_order(changed, bits, layout.ordered) - to_order(base, bits, layout.ordered)) & mask;
  const bool up = !(step >> (bits - 1));
  const uint64_t size = up ? step : (0 - step) & mask;
  coder.bit(up, model.direction.p);
  update(k, model.direction, up);
  const int octave = 63 - __builtin_clzll(size | 1);
  AdaptiveBit& one = model.one[cls];
  coder.bit(octave == 0, one.p);
  update(k, one, octave == 0);
  if (octave == 0) return;
  for (int i = 1; i < bits - 1; ++i) {
    AdaptiveBit& stop = model.octave[cls][i];
    coder.bit(octave == i, stop.p);
    update(k, stop, octave == i);
    if (octave == i) break;
  }
  const int learnt = octave < kTopBits ? octave : kTopBits;
  uint32_t node = 1;
  for (int i = octave - 1; i >= octave - learnt; --i) {
    const uint32_t value = (size >> i) & 1;
    AdaptiveBit& bit = model.top[octave][node];
    coder.bit(value, bit.p);
    update(k, bit, value);
    node = 2 * node + value;
  }
  coder.direct(size & word_mask(octave - learnt), octave - learnt);
}

// The table and shift that code this chunk's changes in the fewest bits, the unchanged being counted in a sample.
template <class W>
void choose_table(const W* base, size_t count, const Layout& layout, const RateTable* tables, size_t table_count,
                  const W* old_words, size_t changed_count, size_t& best_table, int& best_shift) {
  const Constants& k = constants();
  const size_t fields = size_t{layout.field_mask} + 1;
  const size_t blocks = (count + kBlockElements - 1) / kBlockElements;
  const size_t stride = std::max<size_t>(1, blocks / kSampledBlocks);
  uint32_t seen_by_field[4][kFieldCountMax], changed_by_field[kFieldCountMax];
  for (auto& row : seen_by_field) std::fill_n(row, fields, 0);
  std::fill_n(changed_by_field, fields, 0);
  uint64_t sampled = 0;
  for (size_t b = 0; b < blocks; b += stride) {
    const size_t start = b * kBlockElements, end = std::min(count, start + kBlockElements);
    count_fields(base + start, end - start, layout, seen_by_field);
    sampled += end - start;
  }
  for (size_t i = 0; i < changed_count; ++i) changed_by_field[field_of(old_words[i], layout)] += 1;
  uint64_t best = ~uint64_t{0};
  for (size_t t = 0; t < table_count; ++t) {
    const RateTable& table = tables[t];
    uint64_t changed[kClassCount] = {}, seen[kClassCount] = {};
    for (size_t field = 0; field < fields; ++field) {
      const int cls = class_of_field(static_cast<uint32_t>(field), table.top);
      seen[cls] += uint64_t{seen_by_field[0][field]} + seen_by_field[1][field] + seen_by_field[2][field] +
                   seen_by_field[3][field];
      changed[cls] += changed_by_field[field];
    }
    for (int c = 0; c < kClassCount; ++c) seen[c] = std::max(changed[c], seen[c] * count / sampled);
    uint64_t bits = 0;
    const int shift = best_shift_of(k, table.rate, seen, changed, bits);
    if (bits < best) {
      best = bits;
      best_table = t;
      best_shift = shift;
    }
  }
}

// The changes of a chunk, taken one by one.
template <class W>
struct Changed {
  const uint32_t* positions;
  const W* words;

  TW_INLINE size_t position() const { return *positions; }
  TW_INLINE W word() const { return *words; }
  TW_INLINE void advance() { ++positions, ++words; }
};

// Direction and octave of every change, whatever method codes the chunk in the end.
template <class W>
void count_steps(const W* old_words, const W* new_words, size_t count, const Layout& layout, StepCounts& steps) {
  constexpr int bits = 8 * sizeof(W);
  const uint64_t mask = word_mask(bits);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t step =
        (to_order(new_words[i], bits, layout.ordered) - to_order(old_words[i], bits, layout.ordered)) & mask;
    if (step == 0) continue;  // someone wrote to the base meanwhile
    const bool up = !(step >> (bits - 1));
    steps.by_octave[up][63 - __builtin_clzll(up ? step : (0 - step) & mask)] += 1;
  }
}

template <class Isa, class W>
TW_INLINE void encode_block(RangeEncoder& coder, ValueModel& model, const Constants& k, const Layout& layout,
                            const Costs& costs, const W* base, size_t count, uint32_t total, size_t start,
                            Changed<W>& next) {
  const int shift = costs.scale_shift;
  const BlockCosts<Isa, W> block(base, count, layout, costs);
  size_t from = 0;
  uint32_t before = 0;
  while (from < count) {
    const size_t at = next.position() - start;
    if (at >= count) {
      coder.last_symbol(first_before(k, (total - before) << shift, static_cast<uint32_t>(count - from)));
      return;
    }
    const size_t group = at / kGroupElements;
    const uint32_t until =
        block.before_group[group] + sum_costs(base + group * kGroupElements, at % kGroupElements, layout, costs);
    const uint32_t after = until + cost_of(base[at], layout, costs);
    coder.symbol(first_before(k, (until - before) << shift, static_cast<uint32_t>(at - from)),
                 first_before(k, (after - before) << shift, static_cast<uint32_t>(at + 1 - from)));
    encode_value(coder, model, k, layout, class_of_field(field_of(base[at], layout), costs.top), base[at], next.word());
    next.advance();
    from = at + 1;
    before = after;
  }
}

template <class Isa, class W>
EncodeResult encode_chunk(const EncodeJob& job, const Layout& layout) {
  const Constants& k = constants();
  const W* base = static_cast<const W*>(job.base);
  const W* changed = static_cast<const W*>(job.changed);
  W* const old_words = static_cast<W*>(job.words);
  W* const new_words = old_words + job.count;
  EncodeResult result;
  const size_t bytes = job.count * sizeof(W);
  const size_t hash_blocks = bytes <= kShortBytes ? 0 : (bytes - 1) / kHashBlockBytes;
  LongHash<Isa> base_hash, new_hash;
  size_t changed_count = 0, hashed = 0;
  for (size_t at = 0; at < job.count; at += kPieceElements) {
    const size_t count = std::min(kPieceElements, job.count - at);
    const size_t found =
        Isa::diff(base + at, changed + at, count, static_cast<uint32_t>(at), job.positions + changed_count);
    // Gathered while the piece is in cache: the coder would wait for memory at every change.
    for (size_t i = changed_count; i < changed_count + found; ++i) {
      old_words[i] = base[job.positions[i]];
      new_words[i] = changed[job.positions[i]];
    }
    changed_count += found;
    const size_t until = std::min(hash_blocks, (at + count) * sizeof(W) / kHashBlockBytes);
    base_hash.blocks(reinterpret_cast<const uint8_t*>(base) + hashed * kHashBlockBytes, until - hashed);
    new_hash.blocks(reinterpret_cast<const uint8_t*>(changed) + hashed * kHashBlockBytes, until - hashed);
    hashed = until;
  }
  const auto digest = [&](LongHash<Isa>& hash, const void* data) {
    const auto* p = static_cast<const uint8_t*>(data);
    if (bytes <= kShortBytes) return xxh3_short(p, bytes);
    return hash.finish(p + hash_blocks * kHashBlockBytes, bytes - hash_blocks * kHashBlockBytes, bytes);
  };
  result.base_digest = digest(base_hash, base);
  result.new_digest = digest(new_hash, changed);
  result.changed_count = changed_count;
  if (changed_count == 0) return result;
  count_steps(old_words, new_words, changed_count, layout, result.steps);
  if (job.capacity < kChunkHeaderBytes + 16) {
    result.status = Status::too_large;
    return result;
  }

  size_t table = 0;
  int shift = 0;
  choose_table(base, job.count, layout, job.tables, job.table_count, old_words, changed_count, table, shift);
  job.out[0] = static_cast<uint8_t>(table);
  job.out[1] = static_cast<uint8_t>(shift + kShiftBias);
  Costs costs;
  make_costs(job.tables[table], shift, costs);
  ValueModel model;
  reset(model, job.tables[table]);
  RangeEncoder coder(job.out + kChunkHeaderBytes, job.capacity - kChunkHeaderBytes);
  job.positions[changed_count] = 0xFFFFFFFF;  // ends the list: beyond every block
  Changed<W> next{job.positions, new_words};
  uint32_t sums[kPieceBlocks];
  for (size_t at = 0; at < job.count && !coder.full(); at += kPieceElements) {
    const size_t in_piece = std::min(kPieceElements, job.count - at);
    piece_sums<Isa>(base + at, in_piece, layout, costs, sums);
    for (size_t b = 0; b * kBlockElements < in_piece; ++b) {
      const size_t start = at + b * kBlockElements;
      const size_t count = std::min(kBlockElements, job.count - start);
      prefetch_ahead(base + start);
      if (next.position() - start >= count) {
        coder.last_symbol(first_before(k, sums[b] << costs.scale_shift, static_cast<uint32_t>(count)));
      } else {
        encode_block<Isa>(coder, model, k, layout, costs, base + start, count, sums[b], start, next);
      }
    }
  }
  result.size = kChunkHeaderBytes + coder.finish();
  if (coder.full()) result.status = Status::too_large;
  return result;
}

}  // namespace

}  // namespace thinwire
