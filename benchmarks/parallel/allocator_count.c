/* What torch's CPU allocator holds in this process, byte for byte, whichever thread frees it.

   Preloaded (LD_PRELOAD), it counts what libc10 takes by posix_memalign and gives back by free. Torch's profiler sees
   only the threads that it was started in, and gloo frees in its own. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS (1u << 22)
#define ALIGNMENT 64 /* of c10's allocator */
#define GIVEN_BACK ((void *)1)

static void *blocks[SLOTS];
static size_t sizes[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long held_bytes, peak_bytes;
static int (*real_posix_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static void find_real(void) {
    if (!real_free) {
        real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
        real_free = dlsym(RTLD_NEXT, "free");
    }
}

static unsigned slot_of(void *block) { return (((uint64_t)block >> 6) * 0x9E3779B97F4A7C15ull) >> 42; }

static int is_torch(void *caller) {
    Dl_info found;
    return dladdr(caller, &found) && found.dli_fname && strstr(found.dli_fname, "libc10");
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    find_real();
    int failed = real_posix_memalign(block, alignment, size);
    if (failed || alignment != ALIGNMENT || !is_torch(__builtin_return_address(0)))
        return failed;
    pthread_mutex_lock(&lock);
    unsigned slot = slot_of(*block);
    while (blocks[slot] && blocks[slot] != GIVEN_BACK)
        slot = (slot + 1) % SLOTS;
    blocks[slot] = *block;
    sizes[slot] = size;
    held_bytes += size;
    if (held_bytes > peak_bytes)
        peak_bytes = held_bytes;
    pthread_mutex_unlock(&lock);
    return 0;
}

void free(void *block) {
    find_real();
    if (block && (uint64_t)block % ALIGNMENT == 0) {
        pthread_mutex_lock(&lock);
        for (unsigned slot = slot_of(block); blocks[slot]; slot = (slot + 1) % SLOTS)
            if (blocks[slot] == block) {
                held_bytes -= sizes[slot];
                blocks[slot] = blocks[(slot + 1) % SLOTS] ? GIVEN_BACK : NULL;
                break;
            }
        pthread_mutex_unlock(&lock);
    }
    real_free(block);
}

long allocator_held_bytes(void) { return held_bytes; }
long allocator_peak_bytes(void) { return peak_bytes; }

void allocator_reset_peak(void) {
    pthread_mutex_lock(&lock);
    peak_bytes = held_bytes;
    pthread_mutex_unlock(&lock);
}
