// Hostile chunks for every kernel. Each case is a base, rate tables and bytes that claim to be a chunk; every
// instruction set decodes it in every mode, and all of them must agree. What the encoders wrote must come back exactly.
//
//   fuzz_decode [--seconds N] [--iterations N] [--seed S] [--keep FOLDER] [FILE or FOLDER ...]
//
// Replays the files first, then makes cases from the seed. A finding ends with a non-zero exit code, and its case lies
// in FOLDER as a file that replays it. Meant to run under AddressSanitizer and UBSan (cmake -DTHINWIRE_SANITIZE=ON).
// With clang, the same cases under libFuzzer, which brings its own main:
//
//   clang++ -std=c++20 -O1 -g -fsanitize=fuzzer,address,undefined -DTHINWIRE_LIBFUZZER native/fuzz/fuzz_decode.cpp
//       native/core/{model,chunk,fit,isa_scalar}.cpp -o fuzz_decode
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "check.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  thinwire::fuzz::Case input = thinwire::fuzz::unpack(data, size);
  if (const char* finding = thinwire::fuzz::check(input)) {
    std::fprintf(stderr, "FINDING: %s\n", finding);
    std::abort();
  }
  return 0;
}

#ifndef THINWIRE_LIBFUZZER

namespace {

using namespace thinwire::fuzz;

// Long enough for any case under the sanitizers on a busy machine.
constexpr unsigned kHangSeconds = 60;

Case current;
std::string keep_folder = ".";

// Called once, whatever went wrong; the process is about to end.
void keep_current() {
  static bool done = false;
  if (done) return;
  done = true;
  const auto bytes = pack(current);
  uint64_t name = 0xCBF29CE484222325;
  for (const uint8_t byte : bytes) name = (name ^ byte) * 0x100000001B3;
  char path[512];
  std::snprintf(path, sizeof path, "%s/native-%016llx", keep_folder.c_str(), static_cast<unsigned long long>(name));
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  std::fprintf(stderr, "reproduce: fuzz_decode %s\n", path);
}

}  // namespace

// UBSan calls this at each report, and not the death callback. No effect where it is not linked in.
extern "C" void __ubsan_on_report() { keep_current(); }

namespace {

void on_signal(int number) {
  std::fprintf(stderr, "FINDING: %s\n",
               number == SIGALRM ? "a case takes too long" : "the process was stopped by a signal");
  keep_current();
  _exit(1);
}

void run(const Case& input) {
  current = input;
  alarm(kHangSeconds);
  const char* finding = check(current);
  alarm(0);
  if (!finding) return;
  std::fprintf(stderr, "FINDING: %s\n", finding);
  keep_current();
  std::exit(1);
}

void watch() {
  signal(SIGALRM, on_signal);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(keep_current);
#else
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT}) signal(number, on_signal);
#endif
}

struct Options {
  double seconds = 0;
  uint64_t iterations = 0, seed = 1;
  std::vector<std::filesystem::path> files;
};

int usage() {
  std::fprintf(stderr,
               "usage: fuzz_decode [--seconds N] [--iterations N] [--seed S] [--keep FOLDER] [FILE or FOLDER ...]\n");
  return 2;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      if (std::filesystem::is_directory(word)) {
        for (const auto& entry : std::filesystem::directory_iterator(word)) options.files.push_back(entry.path());
      } else {
        options.files.emplace_back(word);
      }
      continue;
    }
    if (++i == argc) return false;
    if (word == "--seconds") {
      options.seconds = std::strtod(argv[i], nullptr);
    } else if (word == "--iterations") {
      options.iterations = std::strtoull(argv[i], nullptr, 0);
    } else if (word == "--seed") {
      options.seed = std::strtoull(argv[i], nullptr, 0);
    } else if (word == "--keep") {
      keep_folder = argv[i];
    } else {
      return false;
    }
  }
  std::sort(options.files.begin(), options.files.end());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) return usage();
  watch();
  std::printf("instruction sets:");
  for (const auto* kernels : running_kernels()) std::printf(" %s", kernels->name);
  std::printf("\n");
  for (const auto& path : options.files) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", path.c_str());
      return 2;
    }
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    run(unpack(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  }
  std::printf("replayed %zu files\n", options.files.size());

  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  uint64_t iteration = 0;
  for (; iteration < options.iterations || elapsed() < options.seconds; ++iteration)
    run(random_case(options.seed, iteration));
  const Counts& counts = checked();
  std::printf(
      "native: %llu iterations in %.0f s, seed %llu: %llu payloads decoded (%llu sound, %llu refused), no finding\n",
      static_cast<unsigned long long>(iteration), elapsed(), static_cast<unsigned long long>(options.seed),
      static_cast<unsigned long long>(counts.sound + counts.refused), static_cast<unsigned long long>(counts.sound),
      static_cast<unsigned long long>(counts.refused));
  return 0;
}

#endif
