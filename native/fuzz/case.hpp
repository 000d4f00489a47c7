// A fuzz case: a few bytes that say how to make a base, its successor and rate tables, and a payload to decode.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "../core/chunk.hpp"

namespace thinwire::fuzz {

inline constexpr size_t kMaxWords = 5000;
inline constexpr size_t kMaxCaseTables = 4;

// Those of the dtypes that safetensors has (docs/format.md, section 3).
inline constexpr Layout kLayouts[] = {
    {2, 7, 0xFF, true}, {2, 10, 0x1F, true}, {4, 23, 0xFF, true}, {8, 52, 0x7FF, true},
    {1, 3, 0xF, true},  {1, 2, 0x1F, true},  {1, 4, 0xF, false},  {1, 0, 0, false},
    {2, 0, 0, false},   {4, 0, 0, false},    {8, 0, 0, false},
};

enum BaseKind : uint8_t { kBits, kClustered, kConstant, kZero, kMixed, kBaseKinds };
enum ChangeKind : uint8_t { kNone, kRareSteps, kSteps, kDenseSteps, kRareBits, kAllBits, kCorners, kChangeKinds };
enum TableKind : uint8_t { kFitted, kRandom, kCheapest, kDearest, kAlternating, kTableKinds };
enum Flag : uint8_t { kWrongBase = 1, kWrongTables = 2 };

struct Case {
  uint8_t layout = 0, base_kind = 0, change_kind = 0, table_kind = 0, table_count = 1, flags = 0;
  uint16_t words = 0;
  uint64_t seed = 0;
  std::vector<uint8_t> payload;  // empty in a fresh case: made from what the encoder wrote
};
inline constexpr size_t kCaseHeaderBytes = 16;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t limit) { return limit ? next() % limit : 0; }
  uint8_t byte() { return static_cast<uint8_t>(next() >> 56); }
  bool one_in(uint64_t n) { return below(n) == 0; }

 private:
  uint64_t state_;
};

inline std::vector<uint8_t> pack(const Case& input) {
  std::vector<uint8_t> bytes = {input.layout,     input.base_kind,   input.change_kind,
                                input.table_kind, input.table_count, input.flags};
  for (int i = 0; i < 2; ++i) bytes.push_back(static_cast<uint8_t>(input.words >> (8 * i)));
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<uint8_t>(input.seed >> (8 * i)));
  bytes.insert(bytes.end(), input.payload.begin(), input.payload.end());
  return bytes;
}

// Any bytes are a case, so that a fuzzer that knows nothing of the fields makes use of each.
inline Case unpack(const uint8_t* data, size_t size) {
  uint8_t head[kCaseHeaderBytes] = {};
  std::memcpy(head, data, std::min(size, kCaseHeaderBytes));
  Case input;
  input.layout = head[0], input.base_kind = head[1], input.change_kind = head[2];
  input.table_kind = head[3], input.table_count = head[4], input.flags = head[5];
  input.words = static_cast<uint16_t>(head[6] | head[7] << 8);
  for (int i = 0; i < 8; ++i) input.seed |= static_cast<uint64_t>(head[8 + i]) << (8 * i);
  if (size > kCaseHeaderBytes) input.payload.assign(data + kCaseHeaderBytes, data + size);
  return input;
}

inline Case random_case(uint64_t seed, uint64_t iteration) {
  Random random(seed * 0xD1342543DE82EF95 + iteration);
  Case input;
  input.layout = random.byte(), input.base_kind = random.byte(), input.change_kind = random.byte();
  input.table_kind = random.byte(), input.table_count = random.byte();
  const size_t limits[] = {17, 300, 1500, kMaxWords + 1};
  input.words = static_cast<uint16_t>(random.below(limits[random.below(4)]));
  input.seed = random.next();
  return input;
}

// ---------------------------------------------------------------- what a case describes

struct Made {
  Layout layout;
  std::vector<RateTable> tables;
  std::vector<uint8_t> base, fresh;
};

inline uint64_t load_word(const std::vector<uint8_t>& bytes, size_t index, size_t word_bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes.data() + index * word_bytes, word_bytes);
  return word;
}

inline void store_word(std::vector<uint8_t>& bytes, size_t index, size_t word_bytes, uint64_t word) {
  std::memcpy(bytes.data() + index * word_bytes, &word, word_bytes);
}

inline uint64_t base_word(Random& random, uint8_t kind, const Layout& layout, uint64_t constant) {
  switch (kind) {
    case kBits: return random.next();
    case kConstant: return constant;
    case kZero: return 0;
    case kMixed: return random.one_in(2) ? random.next() : random.one_in(2) ? 0 : ~uint64_t{0};
    default: break;
  }
  // As weights lie: a few neighbouring exponents, halving in number.
  uint64_t field = layout.field_mask * 4u / 5u;
  while (field > 0 && random.one_in(2)) --field;
  const uint64_t field_bits = static_cast<uint64_t>(layout.field_mask) << layout.field_shift;
  return (random.next() & ~field_bits) | field << layout.field_shift;
}

inline uint64_t changed_word(Random& random, uint8_t kind, const Layout& layout, uint64_t word) {
  const int bits = 8 * layout.word_bytes;
  const auto step = [&](uint64_t most) {
    const uint64_t order = to_order(word, bits, layout.ordered), size = 1 + random.below(most);
    return from_order((random.one_in(2) ? order + size : order - size) & word_mask(bits), bits, layout.ordered);
  };
  switch (kind) {
    case kNone: return word;
    case kRareSteps: return random.one_in(300) ? step(1) : word;
    case kSteps: return random.one_in(20) ? step(random.one_in(8) ? 100 : 1) : word;
    case kDenseSteps: return random.one_in(8) ? word : step(6);
    case kRareBits: return random.one_in(100) ? random.next() : word;
    case kAllBits: return random.next();
    default: break;
  }
  const uint64_t sign = uint64_t{1} << (bits - 1);
  const uint64_t corners[] = {word, 0, sign, word_mask(bits), sign - 1, 1, ~word, word ^ sign, word + sign, word ^ 1};
  return corners[random.below(std::size(corners))];
}

inline std::vector<RateTable> make_tables(Random& random, uint8_t kind, size_t table_count, const Layout& layout,
                                          const std::vector<uint8_t>& base, const std::vector<uint8_t>& fresh) {
  std::vector<RateTable> tables;
  if (kind == kFitted) {
    const size_t fields = size_t{layout.field_mask} + 1, count = base.size() / layout.word_bytes;
    // Words, not bytes: the kernels read aligned memory.
    std::vector<uint64_t> base_words(base.size() / 8 + 1), fresh_words(base.size() / 8 + 1);
    std::copy(base.begin(), base.end(), reinterpret_cast<uint8_t*>(base_words.data()));
    std::copy(fresh.begin(), fresh.end(), reinterpret_cast<uint8_t*>(fresh_words.data()));
    std::vector<uint64_t> counts(3 * fields);
    sample(base_words.data(), fresh_words.data(), count, layout, random.below(2), 1 + random.below(3), counts.data());
    RateTable fitted[kFitTables] = {};
    const size_t made = fit(counts.data(), 1, fields, count, fitted);
    tables.assign(fitted, fitted + made);
  }
  while (tables.size() < table_count) {
    RateTable table{};
    table.top =
        static_cast<uint16_t>(random.one_in(4) ? layout.field_mask : random.below(size_t{layout.field_mask} + 1));
    for (int c = 0; c < kClassCount; ++c) {
      const uint8_t rates[] = {random.byte(), random.byte(), 0, 255, static_cast<uint8_t>(c % 2 ? 255 : 0)};
      table.rate[c] = rates[kind % kTableKinds];
      table.one[c] = kind == kCheapest ? 0 : kind == kDearest ? 255 : random.byte();
    }
    tables.push_back(table);
  }
  return tables;
}

inline Made make(const Case& input) {
  Random random(input.seed);
  Made made;
  made.layout = kLayouts[input.layout % std::size(kLayouts)];
  const size_t word_bytes = made.layout.word_bytes, count = input.words % (kMaxWords + 1);
  made.base.resize(count * word_bytes);
  made.fresh.resize(count * word_bytes);
  const uint64_t constant = random.next();
  for (size_t i = 0; i < count; ++i) {
    store_word(made.base, i, word_bytes, base_word(random, input.base_kind % kBaseKinds, made.layout, constant));
    const uint64_t word = load_word(made.base, i, word_bytes);
    store_word(made.fresh, i, word_bytes, changed_word(random, input.change_kind % kChangeKinds, made.layout, word));
  }
  const size_t table_count = 1 + input.table_count % kMaxCaseTables;
  made.tables = make_tables(random, input.table_kind % kTableKinds, table_count, made.layout, made.base, made.fresh);
  return made;
}

// ---------------------------------------------------------------- mutations

inline void damage_once(Random& random, std::vector<uint8_t>& bytes, const std::vector<uint8_t>& other) {
  const size_t size = bytes.size(), at = random.below(size);
  switch (random.below(9)) {
    case 0:
    case 1:
      if (size) bytes[at] ^= static_cast<uint8_t>(1u << random.below(8));
      return;
    case 2:
      if (size) bytes[at] = random.byte();
      return;
    case 3: bytes.resize(at); return;
    case 4:
      for (uint64_t n = 1 + random.below(20); n > 0; --n)
        bytes.push_back(random.one_in(2) ? random.byte() : random.one_in(2) ? 0 : 255);
      return;
    case 5:  // splice
      if (!other.empty())
        bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                     other.end() - static_cast<std::ptrdiff_t>(1 + random.below(other.size())), other.end());
      return;
    case 6:
      if (size)
        bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                    bytes.begin() + static_cast<std::ptrdiff_t>(std::min(size, at + 1 + random.below(8))));
      return;
    case 7:  // another table or shift
      if (size > 1)
        bytes[0] = static_cast<uint8_t>(random.below(kMaxCaseTables + 1)),
        bytes[1] = static_cast<uint8_t>(60 + random.below(137));
      return;
    default: std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.end(), random.one_in(2) ? 0 : 255);
  }
}

// What a payload becomes on its way: damaged, replaced by noise, or whole but for another base or other tables.
inline void damage(Random& random, Case& input, const std::vector<uint8_t>& own) {
  input.payload = own;
  input.flags = 0;
  switch (random.below(8)) {
    case 0:
      input.payload.resize(random.below(400));
      for (auto& byte : input.payload) byte = random.byte();
      if (input.payload.size() > 1 && !random.one_in(4)) {
        input.payload[0] = static_cast<uint8_t>(random.below(kMaxCaseTables));
        input.payload[1] =
            static_cast<uint8_t>(kShiftBias - kShiftMax + static_cast<int>(random.below(2 * kShiftMax + 1)));
      }
      break;
    case 1: input.flags = kWrongBase; break;
    case 2: input.flags = kWrongTables; break;
    default:
      for (uint64_t n = 1 + random.below(3); n > 0; --n) damage_once(random, input.payload, own);
  }
  if (input.payload.empty()) input.payload.push_back(random.byte());
}

// Base and tables as the receiver has them.
inline void misplace(const Case& input, Made& made) {
  Random random(~input.seed);
  const size_t word_bytes = made.layout.word_bytes, count = made.base.size() / word_bytes;
  if (input.flags & kWrongBase) {
    for (uint64_t n = 1 + random.below(20); n > 0 && count; --n)
      store_word(made.base, random.below(count), word_bytes, random.next());
  }
  if (input.flags & kWrongTables)
    made.tables = make_tables(random, kRandom, 1 + random.below(kMaxCaseTables), made.layout, made.base, made.fresh);
}

}  // namespace thinwire::fuzz
