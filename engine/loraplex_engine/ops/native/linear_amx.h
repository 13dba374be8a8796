// Tiles of the base linears on the matrix unit of x86 (AMX), in bfloat16. A packed panel lies as the unit wants it.
//
// NOTE: the unit adds up sixteen pairs of K before it adds them to a sum, and knows nothing of other rows: so a row's bits
// depend on K alone here too. What is missing at the end of K are zeros times zeros.
#pragma once

#include "linear_tile.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

namespace loraplex {

// Whether the system lets this process use tiles; asked for once, since a sandbox or an old kernel may refuse.
inline bool may_use_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return is_granted;
}

// A thread's tile registers: sums in 0 to 2 and, of a second half of the rows, in 3 to 5; x in 6, weights in 7.
class AmxTiles {
 public:
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kBlockTiles = 4;
  static constexpr int64_t kBlockUnits = 768;

  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles() { _tile_release(); }

  void run(const LinearTile<bf16>& tile, int64_t num_rows) {
    const int64_t half = num_rows > kHalf ? div_up(num_rows, 2) : num_rows;
    // other libraries leave configurations of their own, so ours is loaded anew in every share
    if (half != configured_rows_) configure(half);
    if (num_rows > kHalf) {
      run<true>(tile, half, num_rows - half);
    } else {
      run<false>(tile, half, 0);
    }
  }

 private:
  static constexpr int64_t kHalf = 16;       // rows of a register
  static constexpr int64_t kStepUnits = 16;  // along K
  static constexpr int64_t kStepElements = kStepUnits * kPerUnit<bf16>;
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kPanelBytes = kPanelColumns * 4;

  struct Config {
    uint8_t palette = 1, unused[15] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };

  void configure(int64_t num_rows) {
    Config config;
    for (int i = 0; i < 8; ++i) {
      config.bytes[i] = kLineBytes;
      config.rows[i] = i == 7 ? kStepUnits : num_rows;
    }
    finish_writes(&config);
    _tile_loadconfig(&config);
    configured_rows_ = num_rows;
  }

  // `second`: the row from which the second half starts. Halves of an odd number of rows share one, with the same bits.
  template <bool kHasSecond>
  static void run(const LinearTile<bf16>& tile, int64_t num_rows, int64_t second) {
    begin<kHasSecond>(tile, second);
    const bf16 *x = tile.x, *panel = tile.panel;
    const char* ahead = tile.ahead;
    int64_t left = tile.num_elements;
    for (; left >= kStepElements; left -= kStepElements) {
      for (int64_t i = 0; i < kStepUnits * tile.ahead_step; i += kLineBytes) __builtin_prefetch(ahead + i, 0, 2);
      ahead += kStepUnits * tile.ahead_step;
      step<kHasSecond>(x, x + second * tile.x_stride, tile.x_stride * sizeof(bf16), panel);
      x += kStepElements;
      panel += kStepUnits * kPanelColumns * kPerUnit<bf16>;
    }
    if (left) run_tail<kHasSecond>(x, tile.x_stride, left, panel, num_rows + second, second);
    end<kHasSecond>(tile, second);
  }

  template <bool kHasSecond>
  static void run_tail(const bf16* x, int64_t x_stride, int64_t num_elements, const bf16* panel, int64_t num_rows,
                       int64_t second) {
    alignas(64) bf16 rows[kRows][kStepElements] = {}, weights[kStepUnits * kPanelColumns * kPerUnit<bf16>] = {};
    num_rows = std::min(num_rows, kRows);
    for (int64_t r = 0; r < num_rows; ++r) std::memcpy(rows[r], x + r * x_stride, num_elements * sizeof(bf16));
    std::memcpy(weights, panel, div_up(num_elements, kPerUnit<bf16>) * kPanelBytes);
    finish_writes(rows);
    finish_writes(weights);
    step<kHasSecond>(rows[0], rows[second], sizeof(rows[0]), weights);
  }

  // The intrinsics do not tell the compiler what memory they read.
  static void finish_writes(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

  template <bool kHasSecond>
  static void begin(const LinearTile<bf16>& tile, int64_t second) {
    if (!tile.continues) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      if constexpr (kHasSecond) {
        _tile_zero(3);
        _tile_zero(4);
        _tile_zero(5);
      }
      return;
    }
    finish_writes(tile.sums);
    _tile_loadd(0, tile.sums, kPanelBytes);
    _tile_loadd(1, tile.sums + kLanes, kPanelBytes);
    _tile_loadd(2, tile.sums + 2 * kLanes, kPanelBytes);
    if constexpr (kHasSecond) {
      const float* const sums = tile.sums + second * kPanelColumns;
      _tile_loadd(3, sums, kPanelBytes);
      _tile_loadd(4, sums + kLanes, kPanelBytes);
      _tile_loadd(5, sums + 2 * kLanes, kPanelBytes);
    }
  }

  template <bool kHasSecond>
  static void step(const bf16* x, const bf16* second, int64_t x_bytes, const bf16* panel) {
    constexpr int64_t kNext = kLanes * kPerUnit<bf16>;
    _tile_loadd(6, x, x_bytes);
    _tile_loadd(7, panel, kPanelBytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, panel + kNext, kPanelBytes);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(7, panel + 2 * kNext, kPanelBytes);
    _tile_dpbf16ps(2, 6, 7);
    if constexpr (kHasSecond) {
      _tile_loadd(6, second, x_bytes);
      _tile_dpbf16ps(5, 6, 7);
      _tile_loadd(7, panel + kNext, kPanelBytes);
      _tile_dpbf16ps(4, 6, 7);
      _tile_loadd(7, panel, kPanelBytes);
      _tile_dpbf16ps(3, 6, 7);
    }
  }

  template <bool kHasSecond>
  static void end(const LinearTile<bf16>& tile, int64_t second) {
    _tile_stored(0, tile.sums, kPanelBytes);
    _tile_stored(1, tile.sums + kLanes, kPanelBytes);
    _tile_stored(2, tile.sums + 2 * kLanes, kPanelBytes);
    if constexpr (kHasSecond) {
      float* const sums = tile.sums + second * kPanelColumns;
      _tile_stored(3, sums, kPanelBytes);
      _tile_stored(4, sums + kLanes, kPanelBytes);
      _tile_stored(5, sums + 2 * kLanes, kPanelBytes);
    }
  }

  int64_t configured_rows_ = 0;
};

}  // namespace loraplex
#else
namespace loraplex {

inline bool may_use_amx() { return false; }
using AmxTiles = VectorTiles<bf16>;

}  // namespace loraplex
#endif
