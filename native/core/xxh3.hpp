// XXH3-64 with seed 0, written from its published specification. A chunk is hashed piece by piece
// while it is in cache, so the long form is split into blocks() and finish().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "inline.hpp"

namespace thinwire {

namespace {  // one copy per instruction set: the linker must not merge them

inline constexpr size_t kStripeBytes = 64;
inline constexpr size_t kHashBlockBytes = 1024;  // 16 stripes: the secret moves 8 bytes a stripe
inline constexpr size_t kShortBytes = 240;

inline constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
inline constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87ull, kPrime64_2 = 0xC2B2AE3D27D4EB4Full,
                          kPrime64_3 = 0x165667B19E3779F9ull, kPrime64_4 = 0x85EBCA77C2B2AE63ull,
                          kPrime64_5 = 0x27D4EB2F165667C5ull;
inline constexpr uint64_t kPrimeMx1 = 0x165667919E3779F9ull, kPrimeMx2 = 0x9FB21C651E98DF25ull;

alignas(64) inline constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

TW_INLINE uint64_t load64(const uint8_t* p) {
  uint64_t value;
  std::memcpy(&value, p, 8);
  return value;
}

TW_INLINE uint32_t load32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

TW_INLINE uint64_t fold128(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

TW_INLINE uint64_t avalanche_xxh3(uint64_t h) {
  h = (h ^ (h >> 37)) * kPrimeMx1;
  return h ^ (h >> 32);
}

TW_INLINE uint64_t avalanche_xxh64(uint64_t h) {
  h = (h ^ (h >> 33)) * kPrime64_2;
  h = (h ^ (h >> 29)) * kPrime64_3;
  return h ^ (h >> 32);
}

TW_INLINE uint64_t mix16(const uint8_t* data, const uint8_t* secret) {
  return fold128(load64(data) ^ load64(secret), load64(data + 8) ^ load64(secret + 8));
}

// At most kShortBytes of input.
inline uint64_t xxh3_short(const uint8_t* data, size_t len) {
  if (len == 0) return avalanche_xxh64(load64(kSecret + 56) ^ load64(kSecret + 64));
  if (len <= 3) {
    const uint32_t combined = (uint32_t{data[0]} << 16) | (uint32_t{data[len >> 1]} << 24) | data[len - 1] |
                              (static_cast<uint32_t>(len) << 8);
    return avalanche_xxh64(combined ^ static_cast<uint64_t>(load32(kSecret) ^ load32(kSecret + 4)));
  }
  if (len <= 8) {
    const uint64_t input = load32(data + len - 4) + (static_cast<uint64_t>(load32(data)) << 32);
    uint64_t h = input ^ (load64(kSecret + 8) ^ load64(kSecret + 16));
    h ^= ((h << 49) | (h >> 15)) ^ ((h << 24) | (h >> 40));
    h *= kPrimeMx2;
    h ^= (h >> 35) + len;
    h *= kPrimeMx2;
    return h ^ (h >> 28);
  }
  if (len <= 16) {
    const uint64_t low = load64(data) ^ (load64(kSecret + 24) ^ load64(kSecret + 32));
    const uint64_t high = load64(data + len - 8) ^ (load64(kSecret + 40) ^ load64(kSecret + 48));
    return avalanche_xxh3(len + __builtin_bswap64(low) + high + fold128(low, high));
  }
  uint64_t h = len * kPrime64_1;
  if (len <= 128) {
    for (size_t i = (len - 1) / 32 + 1; i-- > 0;) {
      h += mix16(data + 16 * i, kSecret + 32 * i);
      h += mix16(data + len - 16 * (i + 1), kSecret + 32 * i + 16);
    }
    return avalanche_xxh3(h);
  }
  for (size_t i = 0; i < 8; ++i) h += mix16(data + 16 * i, kSecret + 16 * i);
  h = avalanche_xxh3(h);
  for (size_t i = 8; i < len / 16; ++i) h += mix16(data + 16 * i, kSecret + 16 * (i - 8) + 3);
  h += mix16(data + len - 16, kSecret + 136 - 17);
  return avalanche_xxh3(h);
}

// The eight running sums of the long form. Isa::accumulate adds stripes, Isa::scramble closes a block.
template <class Isa>
struct LongHash {
  alignas(64) uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

  // Whole blocks that are not the last of the input.
  TW_INLINE void blocks(const uint8_t* data, size_t count) {
    for (size_t b = 0; b < count; ++b) {
      Isa::accumulate(acc, data + b * kHashBlockBytes, kSecret, kHashBlockBytes / kStripeBytes);
      Isa::scramble(acc, kSecret + 192 - 64);
    }
  }

  // What is left after the blocks, at least one byte; `data` ends the input of `total` bytes in all, and
  // the 64 bytes before its end must be readable.
  TW_INLINE uint64_t finish(const uint8_t* data, size_t left, uint64_t total) {
    Isa::accumulate(acc, data, kSecret, (left - 1) / kStripeBytes);
    Isa::accumulate(acc, data + left - kStripeBytes, kSecret + 192 - 64 - 7, 1);
    uint64_t h = total * kPrime64_1;
    for (int i = 0; i < 4; ++i)
      h += fold128(acc[2 * i] ^ load64(kSecret + 11 + 16 * i), acc[2 * i + 1] ^ load64(kSecret + 19 + 16 * i));
    return avalanche_xxh3(h);
  }
};

template <class Isa>
uint64_t xxh3_64(const uint8_t* data, size_t len) {
  if (len <= kShortBytes) return xxh3_short(data, len);
  LongHash<Isa> hash;
  const size_t block_count = (len - 1) / kHashBlockBytes;
  hash.blocks(data, block_count);
  return hash.finish(data + block_count * kHashBlockBytes, len - block_count * kHashBlockBytes, len);
}

}  // namespace

}  // namespace thinwire
