// Whole products on AMX: many weight rows by a block of packed tokens, forward, and tokens by many weight columns,
// backward. See gemm_amx.h for the tiles.
#pragma once

#include "gemm_amx.h"

namespace moemb {
namespace {

// Vector work on the tiles of the last product, cut into slices that are done between the tile instructions of the
// next one. Derived offers slice(int).
template <class Derived>
class Deferred {
 public:
  // call once per k block
  inline __attribute__((always_inline)) void step() {
    for (int i = 0; i < at_once_ && next_ < end_; ++i) static_cast<Derived*>(this)->slice(next_++);
  }
  void finish() {
    while (next_ < end_) static_cast<Derived*>(this)->slice(next_++);
  }
  alignas(64) float tiles[4 * 256];

 protected:
  void begin(int slices, int64_t calls) {
    next_ = 0;
    end_ = slices;
    at_once_ = static_cast<int>((slices + calls - 1) / calls);
  }

 private:
  int next_ = 0, end_ = 0, at_once_ = 0;
};

// Rows to write results to, one per token of a block; the ones behind the block are null.
struct Rows {
  Bf16* const* rows;
  int64_t column;   // of the first value
  int64_t columns;  // how many of the 32 exist
  bool stream;      // past the caches: whole aligned lines that are read much later
};

// Transposes tiles of 32 weight rows by 16 tokens and writes them as 32 values per token; bias is per weight row.
class StoreRows : public Deferred<StoreRows> {
 public:
  void begin(int token_tiles, const Rows& rows, const Bf16* bias, int64_t calls) {
    rows_ = rows;
    bias_ = bias;
    // a row's next line is far from its last one: fetch it while the next product runs
    for (int row = 0; row < token_tiles * kTileRows; ++row) {
      if (!rows.stream && rows.rows[row] != nullptr) __builtin_prefetch(rows.rows[row] + rows.column, 1);
    }
    Deferred::begin(token_tiles, calls);
  }

  inline __attribute__((always_inline)) void slice(int tile) {
    Vec pairs[kTileRows];
    const float* upper = tiles + tile * 256;
    const float* lower = upper + 512;
    if (bias_ != nullptr) add_bias(tile);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      pairs[i] = as_vec(interleave_rows(load(upper + 32 * i), load(upper + 32 * i + 16)));
      pairs[8 + i] = as_vec(interleave_rows(load(lower + 32 * i), load(lower + 32 * i + 16)));
    }
    transpose(pairs);
    Bf16* const* targets = rows_.rows + tile * kTileRows;
    const __mmask32 mask = tail32(rows_.columns);
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row) {
      if (targets[row] == nullptr) break;
      Bf16* target = targets[row] + rows_.column;
      if (rows_.stream) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target), as_int(pairs[row]));
      } else {
        _mm512_mask_storeu_epi16(target, mask, as_int(pairs[row]));
      }
    }
  }

 private:
  void add_bias(int tile) {
    for (int64_t i = 0; i < 32 && i < rows_.columns; ++i) {
      float* row = tiles + (i < 16 ? 0 : 512) + tile * 256 + (i % 16) * 16;
      const Vec bias = load(bias_ + rows_.column + i, Mask(1));
      store(row, add(load(row), _mm512_broadcastss_ps(_mm512_castps512_ps128(bias))));
    }
  }

  Rows rows_;
  const Bf16* bias_ = nullptr;
};

// How the sum over k is cut: rows of A of one chunk (32 KB) stay in the first-level cache while the tokens pass by.
struct Chunks {
  int64_t count, blocks;  // blocks: of 32 k per chunk, fewer in the last

  explicit Chunks(int64_t k_blocks) {
    constexpr int64_t most = 16;
    count = (k_blocks + most - 1) / most;
    blocks = (k_blocks + count - 1) / count;
  }
};

// Space for `multiply`: the sums so far of each pair of token tiles, and a copy of weight rows.
constexpr int kMostTokenTiles = 16;
constexpr size_t kSumSpace = kMostTokenTiles / 2 * 4 * kTile;
constexpr size_t kMultiplySpace = kSumSpace + 32 * (16 * 64 + 64);

// Fetches the weight rows that are multiplied next, a share per k block.
struct Fetch {
  WeightRows rows;
  int64_t from, share;
  bool any;

  inline __attribute__((always_inline)) void operator()(int64_t pass, int64_t k) const {
    if (!any) return;
    const int64_t end = (pass + 1) * share < 32 ? (pass + 1) * share : 32;
    for (int64_t number = pass * share; number < end; ++number) {
      _mm_prefetch(reinterpret_cast<const char*>(rows.row(number) + from + k * kStep), _MM_HINT_T1);
    }
  }
};

// Multiply pairs of weight rows `from` .. `to` by `token_tiles` packed tokens. `rows_at(pair)` gives WeightRows;
// `begin(pair, tile, columns)` is called when the sums of one or two token tiles stand in `work.tiles`.
template <class RowsAt, class Work, class Begin>
inline void multiply(int64_t from, int64_t to, const char* panel, int64_t token_tiles, int64_t k_blocks, char* space,
                     RowsAt rows_at, Work& work, Begin begin) {
  const Chunks chunks(k_blocks);
  const int64_t passes = (token_tiles + 1) / 2, tile_bytes = k_blocks * kTile;
  float* sums = reinterpret_cast<float*>(space);
  for (int64_t pair = from; pair < to; ++pair) {
    const WeightRows rows = rows_at(pair);
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const int64_t first = chunk * chunks.blocks;
      const int64_t blocks = first + chunks.blocks < k_blocks ? chunks.blocks : k_blocks - first;
      const bool last = chunk + 1 == chunks.count;
      Fetch fetch = {rows, (first + blocks) * kStep, (32 + passes - 1) / passes, !last || pair + 1 < to};
      if (last && pair + 1 < to) fetch.rows = rows_at(pair + 1), fetch.from = 0;
      RowPair a = {reinterpret_cast<const char*>(rows.first) + first * 64,
                   reinterpret_cast<const char*>(rows.second) + first * 64, rows.width * 2};
      // for few tokens a copy costs more than it gains
      if (passes > 2 || !rows.whole()) a = copy_weight_rows(rows, first * kStep, blocks, space + kSumSpace);
      for (int64_t pass = 0; pass < passes; ++pass) {
        const int columns = token_tiles - 2 * pass >= 2 ? 2 : 1;
        const char* b = panel + 2 * pass * tile_bytes + first * kTile;
        float* sum = sums + pass * 1024;
        const float* start = chunk == 0 ? nullptr : sum;
        const auto between = [&](int64_t k) {
          fetch(pass, k);
          work.step();
        };
        if (columns == 2) product<2>(a, b, b + tile_bytes, blocks, start, between);
        else product<1>(a, b, b, blocks, start, between);
        if (last) {
          work.finish();
          sum = work.tiles;
        }
        if (columns == 2) store_tiles<2>(sum);
        else store_tiles<1>(sum);
        if (last) begin(pair, 2 * pass, columns);
      }
    }
  }
  work.finish();
}

// rows = tokens * weights^T for the weight rows `from` .. `to`, in units of 32: the second product of an expert, and a
// linear layer.
inline void multiply_rows(const Bf16* weight, int64_t outputs, int64_t width, const Bf16* bias, const char* panel,
                          int64_t token_tiles, int64_t from, int64_t to, Bf16* const* rows, bool stream, char* space) {
  const int64_t k_blocks = round_up(width, kStep) / kStep, calls = Chunks(k_blocks).blocks;
  StoreRows work;
  const auto rows_at = [&](int64_t pair) {
    const Bf16* first = weight + pair * 32 * width;
    return WeightRows{first, first + kTileRows * width, outputs - pair * 32, outputs - pair * 32 - kTileRows, width};
  };
  const auto begin = [&](int64_t pair, int64_t tile, int columns) {
    work.begin(columns, {rows + tile * kTileRows, pair * 32, outputs - pair * 32, stream}, bias, calls);
  };
  multiply(from, to, panel, token_tiles, k_blocks, space, rows_at, work, begin);
}

// Space for `multiply_columns`: a chunk of four units of weight columns, and their sums for each pair of row tiles.
constexpr int kUnits = 4;
constexpr size_t kColumnSums = kMostTokenTiles / 2 * kUnits * 4 * kTile;
constexpr size_t kColumnSpace = kColumnSums + kUnits * 2 * 16 * kTile;

// Hands 32 rows of 32 sums to write(row, column, low, high), four rows at a time.
template <class Write>
class GiveRows : public Deferred<GiveRows<Write>> {
 public:
  explicit GiveRows(Write write) : write_(write) {}
  void begin(int64_t row, int64_t column, int64_t calls) {
    row_ = row;
    column_ = column;
    Deferred<GiveRows<Write>>::begin(8, calls);
  }
  inline __attribute__((always_inline)) void slice(int part) {
    for (int i = 4 * part; i < 4 * part + 4; ++i) {
      const float* line = this->tiles + i / 16 * 512 + i % 16 * 16;
      Vec low, high;
      lanes_of(load(line), load(line + 256), &low, &high);
      write_(row_ + i, column_, low, high);
    }
  }

 private:
  Write write_;
  int64_t row_ = 0, column_ = 0;
};

// rows = tokens * weights for columns `from` .. `to` of the weights, in units of 32: the backward products. `tokens`
// are `total` rows (a multiple of 32), `depth` values with zeros up to a multiple of 32, `stride` apart.
// `write(row, column, low, high)` gets 32 sums of one row.
template <class Write>
inline void multiply_columns(const Bf16* weight, int64_t depth, int64_t width, const Bf16* tokens, int64_t stride,
                             int64_t total, int64_t from, int64_t to, char* space, Write write) {
  const int64_t k_blocks = round_up(depth, kStep) / kStep;
  const Chunks chunks(k_blocks);
  const int64_t unit_bytes = 2 * chunks.blocks * kTile;
  float* sums = reinterpret_cast<float*>(space);
  char* columns = space + kColumnSums;
  GiveRows<Write> work(write);
  for (int64_t group = from; group < to; group += kUnits) {
    const int64_t units = to - group < kUnits ? to - group : kUnits;
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const int64_t first = chunk * chunks.blocks;
      const int64_t blocks = first + chunks.blocks < k_blocks ? chunks.blocks : k_blocks - first;
      const int64_t rows = depth - first * kStep < blocks * kStep ? depth - first * kStep : blocks * kStep;
      const bool last = chunk + 1 == chunks.count;
      const Bf16* corner = weight + first * kStep * width + group * 32;
      pack_weight_columns(corner, width, rows, units, width - group * 32, unit_bytes, columns);
      for (int64_t row = 0; row < total; row += 32) {
        const char* line = reinterpret_cast<const char*>(tokens + row * stride + first * kStep);
        const RowPair a = {line, line + kTileRows * stride * 2, stride * 2};
        for (int64_t unit = 0; unit < units; ++unit) {
          const char* b = columns + unit * unit_bytes;
          float* sum = sums + (row / 32 * kUnits + unit) * 1024;
          product<2>(a, b, b + blocks * kTile, blocks, chunk == 0 ? nullptr : sum, [&](int64_t) { work.step(); });
          if (last) {
            work.finish();
            sum = work.tiles;
          }
          store_tiles<2>(sum);
          if (last) work.begin(row, (group + unit) * 32, blocks);
        }
      }
    }
  }
  work.finish();
}

}  // namespace
}  // namespace moemb
