// One fuzz case and what must hold for it. Header only: the harness is one translation unit.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <vector>

#include "../core/chunk.hpp"
#include "case.hpp"

namespace thinwire::fuzz {

// Exactly `bytes` of memory, so that the sanitizer sees the first byte outside.
class Exact {
 public:
  explicit Exact(size_t bytes, uint8_t fill = 0xCD)
      : bytes_(bytes), memory_(new (std::align_val_t{64}) uint8_t[bytes]) {
    std::memset(memory_.get(), fill, bytes);
  }
  explicit Exact(const std::vector<uint8_t>& content) : Exact(content.size()) {
    std::copy(content.begin(), content.end(), memory_.get());
  }
  uint8_t* data() const { return memory_.get(); }
  size_t size() const { return bytes_; }
  bool equals(const Exact& other) const {
    return bytes_ == other.bytes_ && std::equal(data(), data() + bytes_, other.data());
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  size_t bytes_;
  std::unique_ptr<uint8_t[], Free> memory_;
};

inline const std::vector<const Kernels*>& running_kernels() {
  static const std::vector<const Kernels*> all = [] {
    std::vector<const Kernels*> found;
    for (const char* name : {"scalar", "avx2", "avx512"}) {
      if (const Kernels* kernels = kernels_named(name)) found.push_back(kernels);
    }
    return found;
  }();
  return all;
}

struct Counts {
  uint64_t sound = 0, refused = 0;
};
inline Counts& checked() {
  static Counts counts;
  return counts;
}

// What a payload makes of a base, as the first instruction set said.
struct Outcome {
  DecodeResult result;
  std::vector<uint8_t> fresh;  // the words, where the payload is sound
};

struct Mode {
  bool writes, in_place, lists;
};
inline constexpr Mode kModes[] = {
    {true, false, false}, {true, false, true},  {true, true, false},
    {true, true, true},   {false, false, true}, {false, false, false},
};

inline const char* check_list(const uint32_t* positions, size_t changed, size_t count) {
  if (changed > count) return "more changes than words";
  for (size_t i = 0; i < changed; ++i) {
    if (positions[i] >= count || (i > 0 && positions[i] <= positions[i - 1]))
      return "positions do not rise within the chunk";
  }
  return nullptr;
}

inline void scatter(Exact& target, const uint32_t* positions, const uint8_t* words, size_t changed, size_t word_bytes) {
  for (size_t i = 0; i < changed; ++i)
    std::memcpy(target.data() + positions[i] * word_bytes, words + i * word_bytes, word_bytes);
}

// Decodes in one mode; the first call fills `outcome`, later ones must agree with it.
inline const char* check_mode(const Kernels& kernels, const Layout& layout, const std::vector<RateTable>& tables,
                              const std::vector<uint8_t>& base_bytes, const std::vector<uint8_t>& payload,
                              const Mode& mode, bool is_first, Outcome& outcome) {
  const size_t word_bytes = layout.word_bytes, count = base_bytes.size() / word_bytes;
  const Exact before(base_bytes), data(payload);
  Exact base(base_bytes), out(base_bytes.size()), words(base_bytes.size()), scratch(decode_scratch_bytes());
  const Exact positions_memory(count * sizeof(uint32_t));
  auto* const positions = reinterpret_cast<uint32_t*>(positions_memory.data());
  DecodeJob job{};
  job.base = base.data();
  job.out = !mode.writes ? nullptr : mode.in_place ? base.data() : out.data();
  job.count = count;
  job.tables = tables.data();
  job.table_count = tables.size();
  job.data = data.data();
  job.size = data.size();
  job.positions = mode.lists ? positions : nullptr;
  job.words = mode.lists ? words.data() : nullptr;
  job.scratch = scratch.data();
  const DecodeResult result = kernels.decode(job, layout);
  const bool ok = result.status == Status::ok;

  if (result.status == Status::too_large) return "decode answered too_large";
  if (mode.lists) {
    if (const char* fault = check_list(positions, result.changed_count, count)) return fault;
  }
  if (!mode.in_place && !base.equals(before)) return "the base was touched";
  if (is_first) {
    outcome.result = result;
    if (ok) outcome.fresh.assign(out.data(), out.data() + out.size());
  }
  if (result.status != outcome.result.status) return "instruction sets or modes disagree on the status";
  if (result.changed_count != outcome.result.changed_count) return "instruction sets or modes disagree on the changes";
  if (ok) {
    if (result.new_digest != outcome.result.new_digest) return "instruction sets or modes disagree on the digest";
    const Exact fresh(outcome.fresh);
    if (kernels.digest(fresh.data(), fresh.size()) != result.new_digest) return "the digest is not that of the words";
    if (mode.writes && !(mode.in_place ? base : out).equals(fresh))
      return "instruction sets or modes disagree on the words";
    if (mode.lists) {
      Exact scattered(base_bytes);
      scatter(scattered, positions, words.data(), result.changed_count, word_bytes);
      if (!scattered.equals(fresh)) return "the listed changes do not give the words";
    }
  }
  // Whoever keeps the old words at the listed places can undo, also what a corrupt payload did until it was refused.
  if (mode.in_place && mode.lists) {
    for (size_t i = 0; i < result.changed_count; ++i) {
      std::memcpy(base.data() + positions[i] * word_bytes, before.data() + positions[i] * word_bytes, word_bytes);
    }
    if (!base.equals(before)) return "the list does not name all that was written";
  }
  return nullptr;
}

inline const char* check_payload(const Layout& layout, const std::vector<RateTable>& tables,
                                 const std::vector<uint8_t>& base, const std::vector<uint8_t>& payload,
                                 Outcome& outcome) {
  bool is_first = true;
  for (const Kernels* kernels : running_kernels()) {
    for (const Mode& mode : kModes) {
      if (const char* fault = check_mode(*kernels, layout, tables, base, payload, mode, is_first, outcome))
        return fault;
      is_first = false;
    }
  }
  ++(outcome.result.status == Status::ok ? checked().sound : checked().refused);
  return nullptr;
}

struct Encoded {
  EncodeResult result;
  std::vector<uint8_t> data;
};

inline Encoded encode(const Kernels& kernels, const Layout& layout, const std::vector<RateTable>& tables,
                      const std::vector<uint8_t>& base_bytes, const std::vector<uint8_t>& new_bytes, size_t capacity) {
  const size_t count = base_bytes.size() / layout.word_bytes;
  const Exact base(base_bytes), changed(new_bytes);
  const Exact positions((count + 1) * sizeof(uint32_t)), words(2 * base_bytes.size()), out(capacity);
  EncodeJob job{};
  job.base = base.data();
  job.changed = changed.data();
  job.count = count;
  job.tables = tables.data();
  job.table_count = tables.size();
  job.positions = reinterpret_cast<uint32_t*>(positions.data());
  job.words = words.data();
  job.out = out.data();
  job.capacity = capacity;
  Encoded encoded{kernels.encode(job, layout), {}};
  if (encoded.result.status == Status::ok && encoded.result.size <= capacity) {
    encoded.data.assign(out.data(), out.data() + encoded.result.size);
  }
  return encoded;
}

// All encoders write the same, in any capacity that holds it, and every decoder reads it back.
inline const char* check_round_trip(const Layout& layout, const std::vector<RateTable>& tables,
                                    const std::vector<uint8_t>& base, const std::vector<uint8_t>& fresh,
                                    std::vector<uint8_t>& payload) {
  // A one-byte word may cost 18 bytes: 24 bits of place and a dozen adaptive bits of 10, all against the odds.
  const size_t roomy = 24 * base.size() + 1024;
  const Encoded first = encode(*running_kernels().front(), layout, tables, base, fresh, roomy);
  if (first.result.status != Status::ok || first.result.size > roomy) return "encode failed or wrote too much";
  for (const Kernels* kernels : running_kernels()) {
    for (const size_t capacity : {roomy, first.result.size + 8, first.result.size, first.result.size / 2}) {
      const Encoded other = encode(*kernels, layout, tables, base, fresh, capacity);
      const bool fits = other.result.status == Status::ok;
      if (capacity == roomy && other.result.status != first.result.status) return "encoders disagree on the status";
      if (fits && (other.result.size > capacity || other.data != first.data)) return "encoders disagree on the bytes";
      if (other.result.changed_count != first.result.changed_count) return "encoders disagree on the changes";
      if (other.result.base_digest != first.result.base_digest || other.result.new_digest != first.result.new_digest) {
        return "encoders disagree on a digest";
      }
    }
  }
  if (first.result.status != Status::ok) return nullptr;
  payload = first.data;
  Outcome outcome;
  if (const char* fault = check_payload(layout, tables, base, payload, outcome)) return fault;
  if (outcome.result.status != Status::ok) return "a payload of our own is refused";
  if (outcome.fresh != fresh) return "a round trip is not exact";
  if (outcome.result.new_digest != first.result.new_digest) return "encoder and decoder disagree on the digest";
  return outcome.result.changed_count == first.result.changed_count ? nullptr
                                                                    : "encoder and decoder disagree on the changes";
}

inline constexpr int kDamagesPerCase = 4;

// A finding, or null; `input` then replays it. Sanitizers end the process themselves.
inline const char* check(Case& input) {
  const Made made = make(input);
  const auto check_given = [&] {
    Made received = made;
    misplace(input, received);
    Outcome outcome;
    return check_payload(received.layout, received.tables, received.base, input.payload, outcome);
  };
  std::vector<uint8_t> own;
  if (const char* fault = check_round_trip(made.layout, made.tables, made.base, made.fresh, own)) return fault;
  if (!input.payload.empty()) return check_given();
  Random random(input.seed + 1);
  for (int i = 0; i < kDamagesPerCase; ++i) {
    damage(random, input, own);
    if (const char* fault = check_given()) return fault;
  }
  return nullptr;
}

}  // namespace thinwire::fuzz
