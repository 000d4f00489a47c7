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

}  // namespace

}  // namespace thinwire
