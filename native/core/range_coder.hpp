// A range coder with 64-bit state and 32-bit steps (Martin 1979, with carries resolved in the output).
#pragma once

#include <cstddef>
#include <cstdint>

#include "inline.hpp"

namespace thinwire {

namespace {  // one copy per instruction set: the linker must not merge them

class RangeEncoder {
 public:
  RangeEncoder(uint8_t* out, size_t capacity) : out_(out), capacity_(capacity) {}

  TW_INLINE void bit(uint32_t value, uint32_t probability_one) {
    const uint64_t bound = (range_ >> 16) * probability_one;
    if (value) {
      range_ = bound;
    } else {
      add(bound);
      range_ -= bound;
    }
    renormalise();
  }

  // A symbol with the weights [from, to) of 2^24.
  TW_INLINE void symbol(uint32_t from, uint32_t to) {
    const uint64_t unit = range_ >> 24;
    add(unit * from);
    range_ = unit * (to - from);
    renormalise();
  }

  // The last symbol, from a weight on: it takes what the cut of the range left over, too.
  TW_INLINE void last_symbol(uint32_t from) {
    const uint64_t start = (range_ >> 24) * from;
    add(start);
    range_ -= start;
    renormalise();
  }

  TW_INLINE void direct(uint64_t value, int bits) {
    for (; bits > 16; bits -= 16) direct16(static_cast<uint32_t>(value >> (bits - 16)) & 0xFFFF, 16);
    if (bits > 0) direct16(static_cast<uint32_t>(value) & ((1u << bits) - 1), bits);
  }

  bool full() const { return size_ + 8 > capacity_; }

  // Ends the stream with the fewest bytes that name a number in [low, low + range): the decoder reads zeros past
  // the end. Four bytes always do, since the range is 2^32 or more. Returns the stream's size.
  size_t finish() {
    for (int bytes = 0; bytes < 8; ++bytes) {
      const uint64_t below = ~uint64_t{0} >> (8 * bytes);
      const uint64_t value = (low_ + below) & ~below;
      if (value - low_ >= range_) continue;
      if (low_ + below < low_) propagate();
      for (int i = 0; i < bytes && !full(); ++i) out_[size_++] = static_cast<uint8_t>(value >> (56 - 8 * i));
      return size_;
    }
    return size_;  // not reached: see above
  }

 private:
  TW_INLINE void direct16(uint32_t value, int bits) {
    range_ >>= bits;
    add(range_ * value);
    renormalise();
  }

  TW_INLINE void add(uint64_t amount) {
    low_ += amount;
    if (low_ < amount) propagate();
  }

  void propagate() {
    size_t i = size_;
    while (i > 0 && ++out_[--i] == 0) {
    }
  }

  TW_INLINE void renormalise() {
    if (range_ >> 32) return;
    if (!full()) {
      for (int i = 0; i < 4; ++i) out_[size_ + i] = static_cast<uint8_t>(low_ >> (56 - 8 * i));
      size_ += 4;
    }
    low_ <<= 32;
    range_ <<= 32;
  }

  uint64_t low_ = 0, range_ = ~uint64_t{0};
  uint8_t* out_;
  size_t size_ = 0, capacity_;
};

class RangeDecoder {
 public:
  RangeDecoder(const uint8_t* data, size_t size) : data_(data), size_(size) {
    code_ = static_cast<uint64_t>(next32()) << 32;
    code_ |= next32();
  }

  // Without a branch: what is unlikely to be guessed should not be guessed.
  TW_INLINE uint32_t bit(uint32_t probability_one) {
    const uint64_t bound = (range_ >> 16) * probability_one;
    const uint64_t zero = 0 - static_cast<uint64_t>(code_ >= bound);
    code_ -= bound & zero;
    range_ = bound + ((range_ - 2 * bound) & zero);
    renormalise();
    return static_cast<uint32_t>(zero + 1);
  }

  // Whether the symbol is the last one, which begins at the weight `from`; if so, it is taken.
  TW_INLINE bool take_last(uint32_t from) {
    const uint64_t start = (range_ >> 24) * from;
    if (code_ < start) return false;
    code_ -= start;
    range_ -= start;
    renormalise();
    return true;
  }

  // About the weight at which the number lies: a hint, computed in floating point.
  TW_INLINE uint32_t hint() const {
    const double share =
        static_cast<double>(static_cast<int64_t>(code_ >> 1)) / static_cast<double>(static_cast<int64_t>(range_ >> 1));
    return share < 1 ? static_cast<uint32_t>(static_cast<int32_t>(share * (1 << 24))) : (1u << 24) - 1;
  }

  // The exact weight at which the number lies.
  TW_INLINE uint64_t place() const { return code_ / (range_ >> 24); }

  // Takes the symbol with the weights [from, to) if the number lies there.
  TW_INLINE bool take(uint32_t from, uint32_t to) {
    const uint64_t unit = range_ >> 24, start = unit * from;
    if (code_ < start || code_ >= unit * to) return false;
    code_ -= start;
    range_ = unit * (to - from);
    renormalise();
    return true;
  }

  TW_INLINE uint64_t direct(int bits) {
    uint64_t value = 0;
    for (; bits > 16; bits -= 16) value = (value << 16) | direct16(16);
    return bits > 0 ? (value << bits) | direct16(bits) : value;
  }

  // A valid stream is never read further than 8 bytes past its end, and its number lies in the interval.
  bool sound() const { return position_ <= size_ + 8 && code_ < range_; }

 private:
  TW_INLINE uint64_t direct16(int bits) {
    range_ >>= bits;
    uint64_t value = code_ / range_;
    const uint64_t most = (uint64_t{1} << bits) - 1;
    value = value < most ? value : most;
    code_ -= value * range_;
    renormalise();
    return value;
  }

  TW_INLINE void renormalise() {
    if (range_ >> 32) return;
    code_ = (code_ << 32) | next32();
    range_ <<= 32;
  }

  TW_INLINE uint32_t next32() {
    uint32_t word = 0;
    if (position_ + 4 <= size_) {
      for (int i = 0; i < 4; ++i) word = word << 8 | data_[position_ + i];
    } else {
      for (size_t i = 0; i < 4; ++i) word = word << 8 | (position_ + i < size_ ? data_[position_ + i] : 0);
    }
    position_ += 4;
    return word;
  }

  uint64_t code_ = 0, range_ = ~uint64_t{0};
  const uint8_t* data_;
  size_t size_, position_ = 0;
};

}  // namespace

}  // namespace thinwire
