// The scheduler of host_shim.h: fibres, barriers, shuffles, and what is said when threads diverge.
#include "device.cuh"

#if defined(__SANITIZE_ADDRESS__)
#define KV_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KV_ASAN 1
#endif
#endif
#ifdef KV_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(KV_SHIM_UCONTEXT)
#define KV_UCONTEXT 1
#include <ucontext.h>
#endif

namespace kv_shim {
Thread* current;
Index block_at, block_size, grid_size;
unsigned char* shared;
u64 loaded_bytes;

namespace {
constexpr int MAX_THREADS = 1024;
constexpr size_t CANARY_BYTES = 64;
#ifdef KV_ASAN
constexpr size_t STACK_BYTES = (256 << 10) + 1088;  // frames with red zones
#else
constexpr size_t STACK_BYTES = (64 << 10) + 1088;  // no power of two: the same frame of all fibres would fall into the same cache sets
#endif

Thread threads[MAX_THREADS];
char* stacks;
unsigned count;
u64 seed, drawn;
void (*entry)(const void*);
const void* arguments;
char error[2048];
#ifdef KV_ASAN
const void* main_stack;
size_t main_stack_bytes;
#endif

u32 draw(u32 below) {  // xorshift64*
  drawn ^= drawn >> 12, drawn ^= drawn << 25, drawn ^= drawn >> 27;
  return static_cast<u32>((drawn * 0x2545F4914F6CDD1DULL >> 33) % below);
}

void body();
void entered() {
#ifdef KV_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes);
#endif
  body();
}

#ifdef KV_UCONTEXT
ucontext_t contexts[MAX_THREADS], scheduler;
void prepare(Thread& t) {
  ucontext_t& context = contexts[&t - threads];
  getcontext(&context);
  context.uc_stack.ss_sp = t.stack + CANARY_BYTES;
  context.uc_stack.ss_size = STACK_BYTES - CANARY_BYTES;
  makecontext(&context, entered, 0);
}
void to_thread(Thread& t) { swapcontext(&scheduler, &contexts[&t - threads]); }
void to_scheduler(Thread& t) { swapcontext(&contexts[&t - threads], &scheduler); }
#else
extern "C" void kv_shim_switch(void** save, void* load);
asm(R"(
.text
.globl kv_shim_switch
.hidden kv_shim_switch
.type kv_shim_switch, @function
kv_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kv_shim_switch, .-kv_shim_switch
)");
void* scheduler;
void prepare(Thread& t) {
  char* top = t.stack + STACK_BYTES;
  top -= reinterpret_cast<uintptr_t>(top) % 16;
  void** frame = reinterpret_cast<void**>(top) - 8;
  memset(frame, 0, 8 * sizeof(void*));
  frame[6] = reinterpret_cast<void*>(entered);  // where the first switch returns to; above it a null return address, aligned as a call
  t.stack_pointer = frame;
}
void to_thread(Thread& t) { kv_shim_switch(&scheduler, t.stack_pointer); }
void to_scheduler(Thread& t) { kv_shim_switch(&t.stack_pointer, scheduler); }
#endif

void resume(Thread& t) {
  current = &t;
#ifdef KV_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, t.stack, STACK_BYTES);
#endif
  to_thread(t);
#ifdef KV_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void wait(Waits what, const char* file, int line) {
  Thread& t = *current;
  t.waits = what, t.file = file, t.line = line;
#ifdef KV_ASAN
  __sanitizer_start_switch_fiber(what == Waits::ENDED ? nullptr : &t.fake_stack, main_stack, main_stack_bytes);
#endif
  to_scheduler(t);
#ifdef KV_ASAN
  __sanitizer_finish_switch_fiber(t.fake_stack, &main_stack, &main_stack_bytes);
#endif
}

void body() {
  entry(arguments);
  wait(Waits::ENDED, "", 0);
  abort();  // an ended fibre is never resumed
}

const char* described(const Thread& t, char* to, size_t bytes) {
  const char* file = strrchr(t.file, '/') ? strrchr(t.file, '/') + 1 : t.file;
  if (t.waits == Waits::ENDED) snprintf(to, bytes, "thread %u has ended", t.at.x);
  else snprintf(to, bytes, "thread %u is at %s, %s:%d", t.at.x, t.waits == Waits::SYNC ? "__syncthreads" : "a shuffle", file, t.line);
  return to;
}

bool diverged(const Thread& a, const Thread& b) {
  char one[200], other[200];
  snprintf(error, sizeof error, "divergent threads in block (%u, %u, %u): %s, %s", block_at.x, block_at.y, block_at.z,
           described(a, one, sizeof one), described(b, other, sizeof other));
  return false;
}

bool same_place(const Thread& a, const Thread& b) {
  return a.waits == b.waits && a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

// Run one warp until all its threads wait at a barrier or have ended. False where they diverge.
bool run_warp(unsigned first, unsigned end) {
  unsigned order[WARP];
  for (;;) {
    const unsigned size = end - first;
    for (unsigned i = 0; i < size; i++) {
      const unsigned j = draw(i + 1);
      order[i] = order[j], order[j] = first + i;
    }
    for (unsigned i = 0; i < size; i++)
      if (threads[order[i]].waits == Waits::RUNS) resume(threads[order[i]]);
    bool shuffles = false;
    for (unsigned i = first; i < end; i++) shuffles |= threads[i].waits == Waits::SHUFFLE;
    if (!shuffles) return true;
    for (unsigned i = first; i < end; i++) {
      if (!same_place(threads[first], threads[i]) || threads[first].lane_mask != threads[i].lane_mask) return diverged(threads[first], threads[i]);
      const unsigned from = first + ((i - first) ^ threads[i].lane_mask);
      if (from >= end) return diverged(threads[first], threads[i]);
      threads[i].taken = threads[from].given;
    }
    for (unsigned i = first; i < end; i++) threads[i].waits = Waits::RUNS;
  }
}

bool run_block() {
  for (unsigned i = 0; i < count; i++) {
    Thread& t = threads[i];
    t.waits = Waits::RUNS, t.fake_stack = nullptr;
    t.at = Index{i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
    prepare(t);
  }
  const unsigned warps = (count + WARP - 1) / WARP;
  unsigned order[MAX_THREADS / WARP];
  for (;;) {
    for (unsigned i = 0; i < warps; i++) {
      const unsigned j = draw(i + 1);
      order[i] = order[j], order[j] = i;
    }
    for (unsigned i = 0; i < warps; i++) {
      const unsigned first = order[i] * WARP, end = first + WARP < count ? first + WARP : count;
      if (!run_warp(first, end)) return false;
    }
    for (unsigned i = 1; i < count; i++)
      if (!same_place(threads[0], threads[i])) return diverged(threads[0], threads[i]);
    if (threads[0].waits == Waits::ENDED) return true;
    for (unsigned i = 0; i < count; i++) threads[i].waits = Waits::RUNS;
  }
}

bool stacks_are_whole() {
  for (unsigned i = 0; i < count; i++)
    for (size_t j = 0; j < CANARY_BYTES; j++)
      if (threads[i].stack[j] != 0x5a) return snprintf(error, sizeof error, "a thread's stack of %zu bytes overflowed", STACK_BYTES), false;
  return true;
}
}  // namespace

void sync_threads(const char* file, int line) { wait(Waits::SYNC, file, line); }

u32 shuffle_xor(unsigned mask, u32 value, int lane_mask, const char* file, int line) {
  current->given = value, current->lane_mask = mask == 0xffffffffu ? lane_mask : -1;  // only full masks are understood
  wait(Waits::SHUFFLE, file, line);
  return current->taken;
}

int launch(void (*kernel)(const void*), const unsigned* grid, const unsigned* block, unsigned shared_bytes, const void* args) {
  grid_size = Index{grid[0], grid[1], grid[2]}, block_size = Index{block[0], block[1], block[2]};
  count = block[0] * block[1] * block[2];
  if (count == 0 || count > MAX_THREADS) return snprintf(error, sizeof error, "%u threads in a block; 1 to 1024 can run", count), -1;
  if (stacks == nullptr) {
    stacks = static_cast<char*>(aligned_alloc(64, MAX_THREADS * STACK_BYTES / 64 * 64));
    for (int i = 0; i < MAX_THREADS; i++) memset(threads[i].stack = stacks + i * STACK_BYTES, 0x5a, CANARY_BYTES);
  }
  entry = kernel, arguments = args, loaded_bytes = 0, drawn = seed * 2 + 0x9E3779B97F4A7C15ULL;
  const u64 blocks = static_cast<u64>(grid[0]) * grid[1] * grid[2];
  for (u64 i = 0; i < blocks; i++) {
    block_at = Index{static_cast<u32>(i % grid[0]), static_cast<u32>(i / grid[0] % grid[1]), static_cast<u32>(i / grid[0] / grid[1])};
    shared = static_cast<unsigned char*>(malloc(shared_bytes));  // aligned to 16, and with red zones under AddressSanitizer
    memset(shared, 0xff, shared_bytes);  // as floats, NaN
    const bool good = run_block() && stacks_are_whole();
    free(shared);
    if (!good) return -1;
  }
  return 0;
}
}  // namespace kv_shim

extern "C" const char* kv_last_error() { return kv_shim::error; }
extern "C" u64 kv_loaded_bytes() { return kv_shim::loaded_bytes; }
extern "C" void kv_set_seed(u64 seed) { kv_shim::seed = seed; }
