// One chunk in, one chunk out: the only interface between the kernels and the binding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model.hpp"

namespace thinwire {

inline constexpr size_t kChunkHeaderBytes = 2;  // table number, shift of its rates
inline constexpr int kShiftMax = 64;            // 8 octaves either way
inline constexpr int kShiftBias = 128;
inline constexpr size_t kMaxTables = 128;

enum class Status : int { ok = 0, too_large = 1, corrupt = 2 };

// How many changes went down ([0]) and up ([1]) by a size of 2^octave to 2^(octave+1) - 1.
struct StepCounts {
  uint64_t by_octave[2][64] = {};
};

struct EncodeJob {
  const void* base;
  const void* changed;
  size_t count;
  const RateTable* tables;
  size_t table_count;
  uint32_t* positions;  // scratch of count + 1
  void* words;          // scratch of 2 * count words
  uint8_t* out;
  size_t capacity;
};

struct EncodeResult {
  Status status = Status::ok;
  size_t size = 0;  // 0: no change
  size_t changed_count = 0;
  uint64_t base_digest = 0, new_digest = 0;
  StepCounts steps;
};

struct DecodeJob {
  const void* base;
  void* out;  // null: only check and list; may equal `base`
  size_t count;
  const RateTable* tables;
  size_t table_count;
  const uint8_t* data;
  size_t size;          // 0: no change
  uint32_t* positions;  // null, or room for `count`
  void* words;          // with positions: room for `count` new words
  void* scratch;        // decode_scratch_bytes()
};

struct DecodeResult {
  Status status = Status::ok;
  size_t changed_count = 0;
  uint64_t new_digest = 0;
};

size_t decode_scratch_bytes();

// Bits (2^-24 each) to code `changed[c]` changes among `seen[c]` weights at `rate` moved by `shift`.
uint64_t bits_of(const Constants& k, const uint8_t* rate, const uint64_t* seen, const uint64_t* changed, int shift);
// The shift of the fewest bits: looked for coarsely, then finely, since the cost has one valley.
int best_shift_of(const Constants& k, const uint8_t* rate, const uint64_t* seen, const uint64_t* changed,
                  uint64_t& best);

inline constexpr size_t kFieldCountMax = 2048;
inline constexpr size_t kSampleElements = 1024;

// Adds every `stride`-th run of 1024 elements, from run `first` on, to three rows of field_mask + 1 counts by class
// field: all words, changed ones, those changed by one step.
void sample(const void* base, const void* changed, size_t count, const Layout& layout, size_t first, size_t stride,
            uint64_t* counts);

// Tables for chunks like those counted (three such rows per source: a tensor, or some neighbours): one, or two where
// that saves more than the second costs in an index. `total_words` is what the sample stands for.
inline constexpr size_t kFitTables = 2;
size_t fit(const uint64_t* counts, size_t source_count, size_t field_count, uint64_t total_words, RateTable* tables);

// One set of kernels per instruction set.
struct Kernels {
  const char* name;
  EncodeResult (*encode)(const EncodeJob&, const Layout&);
  DecodeResult (*decode)(const DecodeJob&, const Layout&);
  uint64_t (*digest)(const uint8_t*, size_t);
  // Lists positions and new words of what differs; both have room for `count`.
  size_t (*find_changes)(const void* base, const void* changed, size_t count, size_t word_bytes, uint32_t* positions,
                         void* words);
  // Likewise of FP32 rounded to BF16, beside BF16; kFoundNan where one is not a number: which bits such a one is
  // rounded to is for the trainer's own library to say.
  size_t (*find_rounded_changes)(const void* base, const float* changed, size_t count, uint32_t* positions,
                                 void* words);
};
inline constexpr size_t kFoundNan = ~size_t{0};
extern const Kernels kScalarKernels;
#ifdef THINWIRE_X86
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#endif

// The best set this CPU runs; `kernels_named` returns null for one it cannot run or does not know.
const Kernels& best_kernels();
const Kernels* kernels_named(const char* name);

}  // namespace thinwire
