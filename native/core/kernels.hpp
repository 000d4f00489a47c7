// Encoder and decoder of one chunk, written once and compiled per instruction set. An Isa supplies the wide loops:
// diff, block_sums and group_prefix (16-bit words), accumulate and scramble (the hash).
#pragma once

#include <algorithm>
#include <cstring>
#include <new>

#include "chunk.hpp"
#include "model.hpp"
#include "range_coder.hpp"
#include "xxh3.hpp"

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
          first < count ? before_group[g] + sum_costs(base + first, std::min(kGroupElements, count - first), layout, costs) : kBeyond;
    }
    prefix = Isa::load_prefix(before_group + 1);
  }

  // The group in which the cost passes `reach`.
  TW_INLINE size_t group_at(uint32_t reach) const {
    const size_t passed = Isa::count_at_most(prefix, reach);
    return passed < kGroupsPerBlock ? passed : kGroupsPerBlock - 1;
  }
};

// ---------------------------------------------------------------- values

template <class W>
TW_INLINE void encode_value(RangeEncoder& coder, ValueModel& model, const Constants& k, const Layout& layout, int cls,
                            W base, W changed, StepCounts& counts) {
  constexpr int bits = 8 * sizeof(W);
  const uint64_t mask = word_mask(bits);
  const uint64_t step = (to_order(changed, bits, layout.ordered) - to_order(base, bits, layout.ordered)) & mask;
  const bool up = !(step >> (bits - 1));
  const uint64_t size = up ? step : (0 - step) & mask;
  coder.bit(up, model.direction.p);
  update(k, model.direction, up);
  const int octave = 63 - __builtin_clzll(size);
  counts.by_octave[up][octave] += 1;
  AdaptiveBit& one = model.one[cls];
  coder.bit(octave == 0, one.p);
  update(k, one, octave == 0);
  if (octave == 0) return;
  for (int i = 1; i < bits - 1; ++i) {
    AdaptiveBit& stop = model.octave[octave_context(cls, i)];
    coder.bit(octave == i, stop.p);
    update(k, stop, octave == i);
    if (octave == i) break;
  }
  const uint32_t half = (size >> (octave - 1)) & 1;
  coder.bit(half, model.half[octave].p);
  update(k, model.half[octave], half);
  coder.direct(size & word_mask(octave - 1), octave - 1);
}

template <class W>
TW_INLINE W decode_value(RangeDecoder& coder, ValueModel& model, const Constants& k, const Layout& layout, int cls, W base) {
  constexpr int bits = 8 * sizeof(W);
  const uint32_t up = coder.bit(model.direction.p);
  update(k, model.direction, up);
  AdaptiveBit& one = model.one[cls];
  const uint32_t is_one = coder.bit(one.p);
  update(k, one, is_one);
  uint64_t size = 1;
  if (!is_one) {
    int octave = 1;
    for (; octave < bits - 1; ++octave) {
      AdaptiveBit& stop = model.octave[octave_context(cls, octave)];
      const uint32_t stops = coder.bit(stop.p);
      update(k, stop, stops);
      if (stops) break;
    }
    const uint32_t half = coder.bit(model.half[octave].p);
    update(k, model.half[octave], half);
    size = uint64_t{2} | half;
    size = (size << (octave - 1)) | coder.direct(octave - 1);
  }
  const uint64_t order = to_order(base, bits, layout.ordered);
  const uint64_t changed = (up ? order + size : order - size) & word_mask(bits);
  return static_cast<W>(from_order(changed, bits, layout.ordered));
}

// ---------------------------------------------------------------- encoder

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
      seen[cls] += uint64_t{seen_by_field[0][field]} + seen_by_field[1][field] + seen_by_field[2][field] + seen_by_field[3][field];
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

template <class Isa, class W>
TW_INLINE void encode_block(RangeEncoder& coder, ValueModel& model, const Constants& k, const Layout& layout, const Costs& costs,
                            const W* base, size_t count, uint32_t total, size_t start, Changed<W>& next, StepCounts& counts) {
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
    const uint32_t until = block.before_group[group] + sum_costs(base + group * kGroupElements, at % kGroupElements, layout, costs);
    const uint32_t after = until + cost_of(base[at], layout, costs);
    coder.symbol(first_before(k, (until - before) << shift, static_cast<uint32_t>(at - from)),
                 first_before(k, (after - before) << shift, static_cast<uint32_t>(at + 1 - from)));
    encode_value(coder, model, k, layout, class_of_field(field_of(base[at], layout), costs.top), base[at], next.word(), counts);
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
    const size_t found = Isa::diff(base + at, changed + at, count, static_cast<uint32_t>(at), job.positions + changed_count);
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
        encode_block<Isa>(coder, model, k, layout, costs, base + start, count, sums[b], start, next, result.steps);
      }
    }
  }
  result.size = kChunkHeaderBytes + coder.finish();
  if (coder.full()) result.status = Status::too_large;
  return result;
}

// ---------------------------------------------------------------- decoder

template <class Isa, class W>
class ChunkDecoder {
 public:
  ChunkDecoder(const uint8_t* data, size_t size, const Layout& layout, const RateTable& table)
      : k_(constants()), layout_(layout), coder_(data + kChunkHeaderBytes, size - kChunkHeaderBytes) {
    make_costs(table, static_cast<int>(data[1]) - kShiftBias, costs_);
    reset(model_, table);
  }

  // Decodes the changes of one piece into positions (relative to the piece, rising) and words. Returns their count,
  // or a count above `count` where no encoder could have written this.
  // `target` is where the piece will be written, for its cache lines.
  TW_INLINE size_t piece(const W* base, size_t count, W* target, uint32_t* positions, W* words) {
    uint32_t sums[kPieceBlocks], none[kPieceBlocks];  // `none`: the weight from which on a block has no change
    piece_sums<Isa>(base, count, layout_, costs_, sums);
    const size_t blocks = (count + kBlockElements - 1) / kBlockElements;
    for (size_t b = 0; b < blocks; ++b) {
      const size_t in_block = std::min(kBlockElements, count - b * kBlockElements);
      none[b] = first_before(k_, sums[b] << costs_.scale_shift, static_cast<uint32_t>(in_block));
    }
    RangeDecoder coder = coder_;  // a local copy lives in registers
    size_t found = 0;
    for (size_t b = 0; b < blocks; ++b) {
      const size_t start = b * kBlockElements;
      prefetch_ahead(base + start);
      if (target != base) prefetch_ahead_for_write(target + start);
      if (coder.take_last(none[b])) continue;
      const size_t more = block(coder, base + start, std::min(kBlockElements, count - start), sums[b],
                                static_cast<uint32_t>(start), positions + found, words + found);
      if (more == 0) return count + 1;
      found += more;
    }
    coder_ = coder;
    return found;
  }

  bool sound() const { return coder_.sound(); }

 private:
  struct Found {
    size_t at;
    uint32_t low, high;  // its cumulative weights
    uint32_t after;      // the cost of the block up to and with it
  };

  TW_INLINE Found weigh(size_t at, size_t from, uint32_t before, uint32_t until, uint32_t after) {
    const int shift = costs_.scale_shift;
    return {at, first_before(k_, (until - before) << shift, static_cast<uint32_t>(at - from)),
            first_before(k_, (after - before) << shift, static_cast<uint32_t>(at + 1 - from)), after};
  }

  // The element at which the block's cost passes `reach`.
  TW_INLINE Found guess(const BlockCosts<Isa, W>& costs, const W* base, size_t count, size_t from, uint32_t before, uint32_t reach) {
    size_t group = costs.group_at(reach);
    if (group * kGroupElements >= count) group = (count - 1) / kGroupElements;
    const size_t first = group * kGroupElements, in_group = std::min(kGroupElements, count - first);
    uint32_t until[kGroupElements + 1];
    until[0] = costs.before_group[group];
    size_t i = 0;
    if (in_group == kGroupElements) {
      for (size_t e = 0; e < kGroupElements; ++e) until[e + 1] = until[e] + cost_of(base[first + e], layout_, costs_);
      for (size_t e = 1; e < kGroupElements; ++e) i += until[e] <= reach;
    } else {
      for (size_t e = 0; e < in_group; ++e) until[e + 1] = until[e] + cost_of(base[first + e], layout_, costs_);
      for (size_t e = 1; e < in_group; ++e) i += until[e] <= reach;
    }
    const size_t at = first + i;
    if (at < from) return {from, 1, 0, 0};
    return weigh(at, from, before, until[i], until[i + 1]);
  }

  [[gnu::noinline]] Found search(const BlockCosts<Isa, W>& costs, const W* base, size_t count, size_t from, uint32_t before,
                                 uint64_t place) {
    const auto cumulative = [&](size_t group) {
      return first_before(k_, (costs.before_group[group] - before) << costs_.scale_shift,
                              static_cast<uint32_t>(group * kGroupElements - from));
    };
    size_t group = from / kGroupElements, end = (count + kGroupElements - 1) / kGroupElements;
    while (end - group > 1) {
      const size_t middle = (group + end) / 2;
      (cumulative(middle) <= place ? group : end) = middle;
    }
    size_t at = group * kGroupElements;
    uint32_t until = costs.before_group[group];
    for (;; ++at) {
      if (at == count) return {from, 1, 0, 0};  // in no valid stream
      const uint32_t after = until + cost_of(base[at], layout_, costs_);
      if (at >= from) {
        const Found found = weigh(at, from, before, until, after);
        if (place < found.high) return found;
      }
      until = after;
    }
  }

  TW_INLINE size_t block(RangeDecoder& coder, const W* base, size_t count, uint32_t total, uint32_t start, uint32_t* positions, W* words) {
    const int shift = costs_.scale_shift;
    const BlockCosts<Isa, W> costs(base, count, layout_, costs_);
    size_t from = 0, found = 0;
    uint32_t before = 0;
    do {
      // Where the cost itself says the change lies; the slow search decides where rounding makes that wrong.
      Found hit = guess(costs, base, count, from, before, before + (inverse_first(k_, coder.hint()) >> shift));
      if (!coder.take(hit.low, hit.high)) {
        hit = search(costs, base, count, from, before, coder.place());
        if (!coder.take(hit.low, hit.high)) return 0;
      }
      positions[found] = start + static_cast<uint32_t>(hit.at);
      const int cls = class_of_field(field_of(base[hit.at], layout_), costs_.top);
      words[found++] = decode_value(coder, model_, k_, layout_, cls, base[hit.at]);
      before = hit.after;
      from = hit.at + 1;
    } while (from < count && !coder.take_last(first_before(k_, (total - before) << shift, static_cast<uint32_t>(count - from))));
    return found;
  }

  const Constants& k_;
  const Layout layout_;
  Costs costs_;
  ValueModel model_;
  RangeDecoder coder_;
};

// Decodes a chunk piece by piece while each is in cache: into `out` (which may be `base`), and as a list of changes
// where asked. `size` is 0 for a chunk without changes.
template <class Isa, class W>
DecodeResult decode_chunk(const DecodeJob& job, const Layout& layout) {
  const W* base = static_cast<const W*>(job.base);
  W* out = static_cast<W*>(job.out);
  DecodeResult result;
  const size_t bytes = job.count * sizeof(W);
  const size_t hash_blocks = bytes <= kShortBytes ? 0 : (bytes - 1) / kHashBlockBytes;
  LongHash<Isa> hash;
  auto* const positions = static_cast<uint32_t*>(job.scratch);
  W* const words = reinterpret_cast<W*>(positions + kPieceElements);
  // The copy of a piece keeps the 64 bytes before it, which the end of the hash may need.
  W* const kept_tail = words + kPieceElements;
  W* const piece_copy = kept_tail + kStripeBytes / sizeof(W);
  size_t hashed = 0;
  union Storage {
    Storage() {}
    ~Storage() {}
    ChunkDecoder<Isa, W> decoder;
  } storage;
  if (job.size) {
    if (job.size < kChunkHeaderBytes || job.data[0] >= job.table_count || job.data[1] < kShiftBias - kShiftMax ||
        job.data[1] > kShiftBias + kShiftMax) {
      result.status = Status::corrupt;
      return result;
    }
    new (&storage.decoder) ChunkDecoder<Isa, W>(job.data, job.size, layout, job.tables[job.data[0]]);
  }
  for (size_t at = 0; at < job.count; at += kPieceElements) {
    const size_t count = std::min(kPieceElements, job.count - at);
    W* const target = out ? out + at : piece_copy;
    const size_t found = job.size ? storage.decoder.piece(base + at, count, target, positions, words) : 0;
    if (found > count) {
      result.status = Status::corrupt;
      break;
    }
    if (target != base + at) {
      if (!out) std::memcpy(kept_tail, kept_tail + kPieceElements, kStripeBytes);
      std::memcpy(target, base + at, count * sizeof(W));
    }
    if (job.positions) {
      auto* kept = static_cast<W*>(job.words) + result.changed_count;
      for (size_t i = 0; i < found; ++i) {
        job.positions[result.changed_count + i] = static_cast<uint32_t>(at) + positions[i];
        kept[i] = job.keep_old ? base[at + positions[i]] : words[i];
      }
    }
    for (size_t i = 0; i < found; ++i) target[positions[i]] = words[i];
    result.changed_count += found;
    const auto* const piece_bytes = reinterpret_cast<const uint8_t*>(target);
    const size_t until = std::min(hash_blocks, (at + count) * sizeof(W) / kHashBlockBytes);
    hash.blocks(piece_bytes, until - hashed);
    if (at + count == job.count) {
      const size_t done = until * kHashBlockBytes - at * sizeof(W);
      result.new_digest = bytes <= kShortBytes ? xxh3_short(piece_bytes, bytes)
                                               : hash.finish(piece_bytes + done, count * sizeof(W) - done, bytes);
    }
    hashed = until;
  }
  if (result.status == Status::ok && job.size && !storage.decoder.sound()) result.status = Status::corrupt;
  return result;
}

// The table of entry points of one instruction set.
template <class Isa>
EncodeResult encode_any(const EncodeJob& job, const Layout& layout) {
  switch (layout.word_bytes) {
    case 1: return encode_chunk<Isa, uint8_t>(job, layout);
    case 2: return encode_chunk<Isa, uint16_t>(job, layout);
    case 4: return encode_chunk<Isa, uint32_t>(job, layout);
    default: return encode_chunk<Isa, uint64_t>(job, layout);
  }
}

template <class Isa>
DecodeResult decode_any(const DecodeJob& job, const Layout& layout) {
  switch (layout.word_bytes) {
    case 1: return decode_chunk<Isa, uint8_t>(job, layout);
    case 2: return decode_chunk<Isa, uint16_t>(job, layout);
    case 4: return decode_chunk<Isa, uint32_t>(job, layout);
    default: return decode_chunk<Isa, uint64_t>(job, layout);
  }
}

}  // namespace

}  // namespace thinwire
