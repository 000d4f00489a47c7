// The decoder of one chunk, written once and compiled per instruction set.
#pragma once

#include <new>

#include "block_costs.hpp"
#include "range_coder.hpp"
#include "xxh3.hpp"

namespace thinwire {

namespace {  // one copy per instruction set: the linker must not merge them

template <class W>
TW_INLINE W decode_value(RangeDecoder& coder, ValueModel& model, const Constants& k, const Layout& layout, int cls,
                         W base) {
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
      AdaptiveBit& stop = model.octave[cls][octave];
      const uint32_t stops = coder.bit(stop.p);
      update(k, stop, stops);
      if (stops) break;
    }
    const int learnt = octave < kTopBits ? octave : kTopBits;
    uint32_t node = 1;
    for (int i = 0; i < learnt; ++i) {
      AdaptiveBit& bit = model.top[octave][node];
      const uint32_t value = coder.bit(bit.p);
      update(k, bit, value);
      node = 2 * node + value;
    }
    size = (uint64_t{node} << (octave - learnt)) | coder.direct(octave - learnt);
  }
  const uint64_t order = to_order(base, bits, layout.ordered);
  const uint64_t changed = (up ? order + size : order - size) & word_mask(bits);
  return static_cast<W>(from_order(changed, bits, layout.ordered));
}

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
  TW_INLINE Found guess(const BlockCosts<Isa, W>& costs, const W* base, size_t count, size_t from, uint32_t before,
                        uint32_t reach) {
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

  [[gnu::noinline]] Found search(const BlockCosts<Isa, W>& costs, const W* base, size_t count, size_t from,
                                 uint32_t before, uint64_t place) {
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

  TW_INLINE size_t block(RangeDecoder& coder, const W* base, size_t count, uint32_t total, uint32_t start,
                         uint32_t* positions, W* words) {
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
    } while (from < count &&
             !coder.take_last(first_before(k_, (total - before) << shift, static_cast<uint32_t>(count - from))));
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
  if (job.count == 0) result.new_digest = xxh3_short(job.data, 0);
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
        kept[i] = words[i];
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

}  // namespace

}  // namespace thinwire
