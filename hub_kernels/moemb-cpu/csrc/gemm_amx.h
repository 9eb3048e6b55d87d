// bf16 products on AMX tiles.
//
// A tile product is C[16][16] += A[16 rows][32 k] * B[32 k][16 columns]; B holds pairs of k interleaved. One call of
// `product` makes 32 rows by 16 or 32 columns. Two arrangements are used, and neither repacks a weight tensor:
//
//   forward   A = 32 rows of the weights, in place for few tokens, else copied to the first-level cache; B = 16 tokens,
//             packed while they are gathered ("token tile").
//   backward  A = gathered rows of tokens; B = 32 columns of the weights, interleaved as they are read.
//
// The sum over k always runs from the first block of 32 to the last in one fp32 accumulator, through memory where it is
// cut into chunks, so a token's result depends on nothing but that token.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace moemb {
namespace {

constexpr int kTile = 1024;   // bytes
constexpr int kStep = 32;     // k per tile product
constexpr int kTileRows = 16;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The tiles of this thread are ours while it lives.
class Tiles {
 public:
  Tiles() {
    const TileConfig config;
    // the compiler's own intrinsic names 8 of the 64 bytes, the rest could be left unwritten
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// What was stored must be in memory before tiles are loaded: the compiler does not know that a tile load reads memory.
inline void stores_before_tiles() { __asm__ volatile("" ::: "memory"); }

// Two tiles of rows of A.
struct RowPair {
  const char* first;
  const char* second;
  int64_t stride;  // bytes
};

// Tiles 0, 1 += A first * B0, B1; tiles 2, 3 += A second * B0, B1 (B1 only if Columns is 2), from `start` (as stored by
// `store_tiles`; null: zeros). `between` is called once per k block: vector work that the tile unit does not wait for.
//
// B is loaded with the hint that it is not used again soon: it passes the first-level cache by, and the rows of A stay
// there for the next B.
template <int Columns, class Work>
inline __attribute__((always_inline)) void product(const RowPair& a, const char* b0, const char* b1, int64_t k_blocks,
                                                   const float* start, Work&& between) {
  if (start == nullptr) {
    _tile_zero(0);
    _tile_zero(2);
    if (Columns == 2) _tile_zero(1);
    if (Columns == 2) _tile_zero(3);
  } else {
    _tile_loadd(0, start, 64);
    _tile_loadd(2, start + 512, 64);
    if (Columns == 2) _tile_loadd(1, start + 256, 64);
    if (Columns == 2) _tile_loadd(3, start + 768, 64);
  }
  for (int64_t k = 0; k < k_blocks; ++k) {
    _tile_stream_loadd(6, b0 + k * kTile, 64);
    _tile_loadd(4, a.first + k * 64, a.stride);
    _tile_loadd(5, a.second + k * 64, a.stride);
    if (Columns == 2) _tile_stream_loadd(7, b1 + k * kTile, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (Columns == 2) {
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    between(k);
  }
}

// Tile (i, j) of a product at float 512 i + 256 j: its 16 rows of 16 columns.
template <int Columns>
inline void store_tiles(float* target) {
  _tile_stored(0, target, 64);
  _tile_stored(2, target + 512, 64);
  if (Columns == 2) {
    _tile_stored(1, target + 256, 64);
    _tile_stored(3, target + 768, 64);
  }
}

// ---- packing ------------------------------------------------------------------------------------------------------

inline __m512i as_int(Vec value) { return _mm512_castps_si512(value); }
inline Vec as_vec(__m512i value) { return _mm512_castsi512_ps(value); }

inline __mmask32 tail32(int64_t count) {
  return count >= 32 ? 0xFFFFFFFFu : (count <= 0 ? 0 : (1u << count) - 1);
}

// Pack 16 rows of `width` bf16 values (null: zeros) into tiles of B: columns are the rows.
inline void pack_token_tile(const Bf16* const rows[kTileRows], int64_t width, char* target) {
  for (int64_t k = 0; k < width; k += kStep, target += kTile) {
    const __mmask32 mask = tail32(width - k);
    Vec lines[kTileRows];
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      const bool exists = rows[row] != nullptr;
      lines[row] = as_vec(exists ? _mm512_maskz_loadu_epi16(mask, rows[row] + k) : _mm512_setzero_si512());
    }
    transpose(lines);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) _mm512_store_ps(target + row * 64, lines[row]);
  }
}

// Copy `count` rows of `width` values to rows `stride` apart, with zeros up to `padded` values (a multiple of 32); rows
// `count` .. `total` become zeros.
inline void copy_rows(const Bf16* source, int64_t source_stride, int64_t count, int64_t total, int64_t width,
                      int64_t padded, int64_t stride, Bf16* target) {
  for (int64_t row = 0; row < total; ++row) {
    for (int64_t k = 0; k < padded; k += kStep) {
      const __mmask32 mask = row < count ? tail32(width - k) : 0;
      _mm512_storeu_si512(target + row * stride + k, _mm512_maskz_loadu_epi16(mask, source + row * source_stride + k));
    }
  }
  stores_before_tiles();
}

// 16 + 16 rows of a weight matrix of `width` columns; fewer where the matrix ends.
struct WeightRows {
  const Bf16* first;
  const Bf16* second;
  int64_t first_valid, second_valid;
  int64_t width;

  bool whole() const { return width % kStep == 0 && first_valid >= kTileRows && second_valid >= kTileRows; }
  const Bf16* row(int64_t number) const {
    return number < kTileRows ? first + number * width : second + (number - kTileRows) * width;
  }
  bool valid(int64_t number) const {
    return number < kTileRows ? number < first_valid : number - kTileRows < second_valid;
  }
};

// Copy columns `from` .. `from + 32 blocks` of the rows to `target`, zeros beyond the matrix. The rows of the copy are
// not a power of two apart, so that they do not compete for the same sets of the first-level cache.
inline RowPair copy_weight_rows(const WeightRows& rows, int64_t from, int64_t blocks, char* target) {
  const int64_t stride = blocks * 64 + 64;
  for (int64_t number = 0; number < 2 * kTileRows; ++number) {
    const Bf16* source = rows.row(number) + from;
    char* line = target + number * stride;
    if (rows.valid(number) && from + blocks * kStep <= rows.width) {
      for (int64_t k = 0; k < blocks; ++k) _mm512_store_si512(line + k * 64, _mm512_loadu_si512(source + k * kStep));
      continue;
    }
    for (int64_t k = 0; k < blocks; ++k) {
      const __mmask32 mask = rows.valid(number) ? tail32(rows.width - from - k * kStep) : 0;
      _mm512_store_si512(line + k * 64, _mm512_maskz_loadu_epi16(mask, source + k * kStep));
    }
  }
  stores_before_tiles();
  return {target, target + kTileRows * stride, stride};
}

// Pack `depth` rows of a weight matrix, `units` times 32 columns of them (`columns` exist), into tiles of B: per unit a
// first tile for each 32 rows, then as many second ones. Column order inside a pair of tiles: see `lanes_of`.
inline void pack_weight_columns(const Bf16* source, int64_t stride, int64_t depth, int64_t units, int64_t columns,
                                int64_t unit_bytes, char* target) {
  const int64_t second = round_up(depth, kStep) / kStep * kTile;
  for (int64_t k = 0; k < round_up(depth, kStep); k += 2, target += 64) {
    const Bf16* line = source + k * stride;
    for (int64_t unit = 0; unit < units; ++unit) {
      const __mmask32 mask = tail32(columns - unit * 32);
      const __m512i even = _mm512_maskz_loadu_epi16(k < depth ? mask : 0, line + unit * 32);
      const __m512i odd = _mm512_maskz_loadu_epi16(k + 1 < depth ? mask : 0, line + stride + unit * 32);
      _mm512_store_si512(target + unit * unit_bytes, _mm512_unpacklo_epi16(even, odd));
      _mm512_store_si512(target + unit * unit_bytes + second, _mm512_unpackhi_epi16(even, odd));
    }
  }
  stores_before_tiles();
}

// Columns 0 .. 15 and 16 .. 31 of a row whose tiles came from `pack_weight_columns`.
inline void lanes_of(Vec low, Vec high, Vec* first, Vec* second) {
  const __m512i even = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i odd = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  *first = _mm512_permutex2var_ps(low, even, high);
  *second = _mm512_permutex2var_ps(low, odd, high);
}

// ---- results ------------------------------------------------------------------------------------------------------

// 32 bf16 values in order.
inline __m512i narrow_pair(Vec first, Vec second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// Two rows of C as 16 pairs (row 0, row 1), one per column.
inline __m512i interleave_rows(Vec first, Vec second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, narrow_pair(first, second));
}

// silu to bf16 accuracy (1e-4 relative): the result is rounded to 8 bits.
inline Vec quick_sigmoid(Vec x) {
  const Vec bound = splat(126.0f);
  const Vec power = _mm512_max_ps(splat(-126.0f), _mm512_min_ps(bound, mul(x, splat(-1.44269504f))));
  const Vec whole = _mm512_roundscale_ps(power, kNearest), part = sub(power, whole);
  Vec p = splat(9.618437e-3f);  // 2^part, Taylor
  p = fma(p, part, splat(5.5503325e-2f));
  p = fma(p, part, splat(2.4022648e-1f));
  p = fma(p, part, splat(6.9314718e-1f));
  p = fma(p, part, splat(1.0f));
  return _mm512_rcp14_ps(add(splat(1.0f), _mm512_scalef_ps(p, whole)));
}

}  // namespace
}  // namespace moemb
