// Python's door to the kernels: checks arguments, lets go of the GIL, turns results into Python objects.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../core/chunk.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using thinwire::RateTable;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SourceCounts = nb::ndarray<const uint64_t, nb::shape<-1, 3, -1>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<uint64_t, nb::shape<3, -1>, nb::c_contig, nb::device::cpu>;

constexpr size_t kTableBytes = 2 + 2 * thinwire::kClassCount;

// Memory that a thread keeps between chunks: asking the system each time costs as much as coding a small chunk.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) & ~size_t{63};
    if (bytes > size_) {
      memory_.reset(new (std::align_val_t{64}) uint8_t[bytes]);
      size_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  std::unique_ptr<uint8_t[], Free> memory_;
  size_t size_ = 0;
};

// What one chunk needs at a time.
struct ThreadScratch {
  Scratch positions, words, out;
};
thread_local ThreadScratch scratch;

struct Codec {
  thinwire::Layout layout;
  std::vector<RateTable> tables;
  const thinwire::Kernels* kernels;

  Codec(int word_bytes, int field_shift, int field_mask, bool ordered, const Bytes& packed,
        const std::string& instructions) {
    if (word_bytes != 1 && word_bytes != 2 && word_bytes != 4 && word_bytes != 8)
      throw nb::value_error("word_bytes must be 1, 2, 4 or 8");
    if (field_shift < 0 || field_shift >= 8 * word_bytes) throw nb::value_error("field_shift lies outside the word");
    // One-byte fields let the wide kernels hold a class in a byte.
    if (field_mask < 0 || field_mask >= static_cast<int>(thinwire::kFieldCountMax) ||
        (word_bytes == 2 && field_mask > 255)) {
      throw nb::value_error("field_mask is out of range");
    }
    layout = {static_cast<uint8_t>(word_bytes), static_cast<uint8_t>(field_shift), static_cast<uint16_t>(field_mask),
              ordered};
    if (packed.size() % kTableBytes || packed.size() / kTableBytes > thinwire::kMaxTables)
      throw nb::value_error("tables are malformed");
    for (size_t at = 0; at < packed.size(); at += kTableBytes) {
      RateTable table;
      const uint8_t* p = packed.data() + at;
      table.top = static_cast<uint16_t>(p[0] | p[1] << 8);
      if (table.top > field_mask) throw nb::value_error("a table's top lies outside the class field");
      std::memcpy(table.rate, p + 2, thinwire::kClassCount);
      std::memcpy(table.one, p + 2 + thinwire::kClassCount, thinwire::kClassCount);
      tables.push_back(table);
    }
    kernels = instructions.empty() ? &thinwire::best_kernels() : thinwire::kernels_named(instructions.c_str());
    if (!kernels) throw nb::value_error("this processor does not run that instruction set");
  }

  size_t words(const uint8_t* data, size_t bytes) const {
    if (reinterpret_cast<uintptr_t>(data) % layout.word_bytes) throw nb::value_error("the buffer is not aligned");
    if (bytes % layout.word_bytes) throw nb::value_error("the buffer is not a whole number of words");
    const size_t count = bytes / layout.word_bytes;
    if (count > thinwire::kMaxChunkElements) throw nb::value_error("a chunk holds at most 2**20 words");
    return count;
  }

  // (data or None where it did not fit, changed_count, base_digest, new_digest, steps down, steps up)
  nb::tuple encode(const Bytes& base, const Bytes& changed, size_t capacity) const {
    if (base.size() != changed.size()) throw nb::value_error("base and new differ in size");
    words(changed.data(), changed.size());
    if (tables.empty()) throw nb::value_error("encoding needs a table");
    const size_t count = words(base.data(), base.size());
    if (capacity > base.size() + 64) capacity = base.size() + 64;
    auto* const positions = scratch.positions.take<uint32_t>(count + 1);
    auto* const words = scratch.words.take<uint8_t>(2 * base.size() + 8);
    auto* const out = scratch.out.take<uint8_t>(capacity + 1);
    thinwire::EncodeResult result;
    {
      nb::gil_scoped_release release;
      result = kernels->encode(
          {base.data(), changed.data(), count, tables.data(), tables.size(), positions, words, out, capacity}, layout);
    }
    nb::object data = nb::none();
    if (result.status == thinwire::Status::ok) data = nb::bytes(reinterpret_cast<const char*>(out), result.size);
    nb::list down, up;
    for (int octave = 0; octave < 8 * layout.word_bytes; ++octave) {
      down.append(result.steps.by_octave[0][octave]);
      up.append(result.steps.by_octave[1][octave]);
    }
    return nb::make_tuple(data, result.changed_count, result.base_digest, result.new_digest, down, up);
  }

  thinwire::DecodeResult run(const Bytes& base, void* out, const Bytes& data, uint32_t* positions, void* kept) const {
    const size_t count = words(base.data(), base.size());
    void* const work = scratch.out.take<uint8_t>(thinwire::decode_scratch_bytes());
    nb::gil_scoped_release release;
    return kernels->decode(
        {base.data(), out, count, tables.data(), tables.size(), data.data(), data.size(), positions, kept, work},
        layout);
  }

  // (new_digest, changed_count), or None where no encoder could have written the data.
  nb::object decode(const Bytes& base, const MutableBytes& out, const Bytes& data) const {
    if (base.size() != out.size()) throw nb::value_error("base and out differ in size");
    words(out.data(), out.size());
    const auto result = run(base, out.data(), data, nullptr, nullptr);
    if (result.status != thinwire::Status::ok) return nb::none();
    return nb::make_tuple(result.new_digest, result.changed_count);
  }

  // (ok, new_digest, positions u4 little-endian, new words)
  nb::tuple changes(const Bytes& base, const Bytes& data) const {
    const size_t count = words(base.data(), base.size());
    auto* const positions = scratch.positions.take<uint32_t>(count + 1);
    auto* const kept = scratch.words.take<uint8_t>(base.size() + 8);
    const auto result = run(base, nullptr, data, positions, kept);
    return nb::make_tuple(result.status == thinwire::Status::ok, result.new_digest,
                          nb::bytearray(reinterpret_cast<const char*>(positions), result.changed_count * 4),
                          nb::bytearray(reinterpret_cast<const char*>(kept), result.changed_count * layout.word_bytes));
  }
};

using Positions = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutablePositions = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class W>
void swap_at(uint8_t* base, const uint32_t* positions, uint8_t* words, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    W old, changed;
    std::memcpy(&old, base + sizeof(W) * positions[i], sizeof(W));
    std::memcpy(&changed, words + sizeof(W) * i, sizeof(W));
    std::memcpy(base + sizeof(W) * positions[i], &changed, sizeof(W));
    std::memcpy(words + sizeof(W) * i, &old, sizeof(W));
  }
}

// Everything is checked before the first word is written, and no signal handler of Python runs in between.
void swap_words(const std::vector<std::tuple<MutableBytes, Positions, MutableBytes, size_t>>& items) {
  for (const auto& [base, positions, words, word_bytes] : items) {
    if (word_bytes != 1 && word_bytes != 2 && word_bytes != 4 && word_bytes != 8)
      throw nb::value_error("word_bytes must be 1, 2, 4 or 8");
    if (words.size() != positions.size() * word_bytes) throw nb::value_error("as many words as positions are needed");
    uint32_t last = 0;
    for (size_t i = 0; i < positions.size(); ++i) last = std::max(last, positions.data()[i]);
    if (positions.size() && last >= base.size() / word_bytes) throw nb::value_error("a position lies outside the base");
  }
  nb::gil_scoped_release release;
  for (const auto& [base, positions, words, word_bytes] : items) {
    switch (word_bytes) {
      case 1: swap_at<uint8_t>(base.data(), positions.data(), words.data(), positions.size()); break;
      case 2: swap_at<uint16_t>(base.data(), positions.data(), words.data(), positions.size()); break;
      case 4: swap_at<uint32_t>(base.data(), positions.data(), words.data(), positions.size()); break;
      default: swap_at<uint64_t>(base.data(), positions.data(), words.data(), positions.size());
    }
  }
}

// Checks what both finders are given; returns how many words there are, and the kernels.
std::pair<size_t, const thinwire::Kernels*> check_find(size_t count, const Bytes& base, size_t word_bytes,
                                                       const MutablePositions& positions, const MutableBytes& words,
                                                       const std::string& instructions) {
  for (const uint8_t* data : {base.data(), static_cast<const uint8_t*>(words.data())}) {
    if (reinterpret_cast<uintptr_t>(data) % word_bytes) throw nb::value_error("the buffer is not aligned");
  }
  if (base.size() != count * word_bytes) throw nb::value_error("base and new differ in size");
  if (count > thinwire::kMaxChunkElements) throw nb::value_error("a chunk holds at most 2**20 words");
  if (positions.size() < count || words.size() < base.size()) throw nb::value_error("there is no room for every word");
  const auto* kernels =
      instructions.empty() ? &thinwire::best_kernels() : thinwire::kernels_named(instructions.c_str());
  if (!kernels) throw nb::value_error("this processor does not run that instruction set");
  return {count, kernels};
}

// How many words differ; their positions and new values are written to the front of `positions` and `words`.
size_t find_changes(const Bytes& base, const Bytes& changed, size_t word_bytes, const MutablePositions& positions,
                    const MutableBytes& words, const std::string& instructions) {
  if (word_bytes != 1 && word_bytes != 2 && word_bytes != 4 && word_bytes != 8)
    throw nb::value_error("word_bytes must be 1, 2, 4 or 8");
  if (changed.size() % word_bytes || reinterpret_cast<uintptr_t>(changed.data()) % word_bytes)
    throw nb::value_error("new is not a whole number of words, or not aligned");
  const auto [count, kernels] =
      check_find(changed.size() / word_bytes, base, word_bytes, positions, words, instructions);
  nb::gil_scoped_release release;
  return kernels->find_changes(base.data(), changed.data(), count, word_bytes, positions.data(), words.data());
}

// Likewise of FP32 rounded to BF16 beside BF16; None where one is not a number.
std::optional<size_t> find_rounded_changes(const Bytes& base, const Floats& changed, const MutablePositions& positions,
                                           const MutableBytes& words, const std::string& instructions) {
  const auto [count, kernels] = check_find(changed.size(), base, 2, positions, words, instructions);
  size_t found;
  {
    nb::gil_scoped_release release;
    found = kernels->find_rounded_changes(base.data(), changed.data(), count, positions.data(), words.data());
  }
  return found == thinwire::kFoundNan ? std::nullopt : std::optional<size_t>(found);
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "words and digests are little-endian");

NB_MODULE(_native, m) {
  // Codecs stay in a Python cache until the interpreter ends, which nanobind would report as leaks.
  nb::set_leak_warnings(false);
  m.doc() = "thinwire's kernels. Use thinwire.codec, which checks more and explains errors.";
  nb::class_<Codec>(m, "Codec", "Codes chunks of one dtype with a set of tables.")
      .def(nb::init<int, int, int, bool, const Bytes&, const std::string&>(), "word_bytes"_a, "field_shift"_a,
           "field_mask"_a, "ordered"_a, "tables"_a, "instructions"_a = "")
      .def("encode", &Codec::encode, "base"_a.noconvert(), "new"_a.noconvert(), "capacity"_a)
      .def("decode", &Codec::decode, "base"_a.noconvert(), "out"_a.noconvert(), "data"_a.noconvert())
      .def("changes", &Codec::changes, "base"_a.noconvert(), "data"_a.noconvert())
      .def(
          "sample",
          [](const Codec& codec, const Bytes& base, const Bytes& changed, size_t first, size_t stride,
             const Counts& counts) {
            if (base.size() != changed.size() || stride == 0)
              throw nb::value_error("base and new differ in size, or the stride is 0");
            if (counts.shape(1) != size_t{codec.layout.field_mask} + 1)
              throw nb::value_error("counts do not fit the class field");
            codec.words(changed.data(), changed.size());
            const size_t count = codec.words(base.data(), base.size());
            nb::gil_scoped_release release;
            thinwire::sample(base.data(), changed.data(), count, codec.layout, first, stride, counts.data());
          },
          "base"_a.noconvert(), "new"_a.noconvert(), "first"_a, "stride"_a, "counts"_a.noconvert());
  m.def(
      "fit",
      [](const SourceCounts& counts, uint64_t total_words) {
        RateTable tables[thinwire::kFitTables];
        const size_t count = thinwire::fit(counts.data(), counts.shape(0), counts.shape(2), total_words, tables);
        std::string packed;
        for (size_t t = 0; t < count; ++t) {
          packed.push_back(static_cast<char>(tables[t].top & 255));
          packed.push_back(static_cast<char>(tables[t].top >> 8));
          packed.append(reinterpret_cast<const char*>(tables[t].rate), thinwire::kClassCount);
          packed.append(reinterpret_cast<const char*>(tables[t].one), thinwire::kClassCount);
        }
        return nb::bytes(packed.data(), packed.size());
      },
      "counts"_a.noconvert(), "total_words"_a);
  m.def(
      "xxh3_64",
      [](const Bytes& data) {
        nb::gil_scoped_release release;
        return thinwire::best_kernels().digest(data.data(), data.size());
      },
      "data"_a.noconvert());
  m.def("find_changes", &find_changes, "base"_a.noconvert(), "new"_a.noconvert(), "word_bytes"_a,
        "positions"_a.noconvert(), "words"_a.noconvert(), "instructions"_a = "");
  m.def("find_rounded_changes", &find_rounded_changes, "base"_a.noconvert(), "new"_a.noconvert(),
        "positions"_a.noconvert(), "words"_a.noconvert(), "instructions"_a = "");
  m.def("swap_words", &swap_words, "items"_a,
        "Exchanges words at positions with those kept beside; all of them, or none where an item is malformed.");
  m.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const char* name : {"avx512", "avx2", "scalar"}) {
      if (thinwire::kernels_named(name)) names.emplace_back(name);
    }
    return names;
  });
}
