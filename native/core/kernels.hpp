// Encoder, decoder and hash of one instruction set, for words of every size.
#pragma once

#include "decode.hpp"
#include "encode.hpp"

namespace thinwire {

namespace {  // one copy per instruction set: the linker must not merge them

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

template <class Isa, class W>
size_t find_changes(const void* base, const void* changed, size_t count, uint32_t* positions, void* words) {
  const W* const new_words = static_cast<const W*>(changed);
  W* const kept = static_cast<W*>(words);
  size_t found = 0;
  for (size_t at = 0; at < count; at += kPieceElements) {
    const size_t end = std::min(count, at + kPieceElements);
    const size_t before = found;
    found += Isa::diff(static_cast<const W*>(base) + at, new_words + at, end - at, static_cast<uint32_t>(at),
                       positions + found);
    for (size_t i = before; i < found; ++i) kept[i] = new_words[positions[i]];
  }
  return found;
}

// FP32 to BF16, to nearest even, as whole-number arithmetic that compilers turn into vectors.
// Returns whether there is a NaN: then the words are of no use.
inline bool round_to_bf16(const float* from, size_t count, uint16_t* to) {
  uint32_t nan = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, 4);
    nan |= static_cast<uint32_t>((bits & 0x7FFFFFFF) > 0x7F800000);
    to[i] = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }
  return nan != 0;
}

template <class Isa>
size_t find_rounded_changes(const void* base, const float* changed, size_t count, uint32_t* positions, void* words) {
  constexpr size_t piece = 2048;
  alignas(64) uint16_t rounded[piece + kPrefetchBytes];
  const uint16_t* const old_words = static_cast<const uint16_t*>(base);
  uint16_t* const kept = static_cast<uint16_t*>(words);
  size_t found = 0;
  for (size_t at = 0; at < count; at += piece) {
    const size_t here = std::min(piece, count - at);
    if (round_to_bf16(changed + at, here, rounded)) return kFoundNan;
    const size_t before = found;
    found += Isa::diff(old_words + at, rounded, here, static_cast<uint32_t>(at), positions + found);
    for (size_t i = before; i < found; ++i) kept[i] = rounded[positions[i] - at];
  }
  return found;
}

template <class Isa>
size_t find_changes_any(const void* base, const void* changed, size_t count, size_t word_bytes, uint32_t* positions,
                        void* words) {
  switch (word_bytes) {
    case 1: return find_changes<Isa, uint8_t>(base, changed, count, positions, words);
    case 2: return find_changes<Isa, uint16_t>(base, changed, count, positions, words);
    case 4: return find_changes<Isa, uint32_t>(base, changed, count, positions, words);
    default: return find_changes<Isa, uint64_t>(base, changed, count, positions, words);
  }
}

}  // namespace

}  // namespace thinwire
