// A Vulkan driver that is another one until a file appears: then the device is lost.
#include <dlfcn.h>
#include <stdint.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICE_LOST = -4 };
typedef void (*any)(void);
typedef any (*lookup)(void *, const char *);

static lookup next_device;
static int32_t (*next_submit)(void *, uint32_t, const void *, uint64_t);
static int32_t (*next_wait)(void *, uint32_t, const uint64_t *, uint32_t, uint64_t);
static int32_t (*next_status)(void *, uint64_t);
static int32_t (*next_queue)(void *);
static int32_t (*next_idle)(void *);

static void *          device_now;
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static int             left = -1; // calls that still succeed; -1: all of them

// The file says how many more calls succeed. What a lost device was doing has ended.
static int lost(void) {
    if (left < 0) {
        FILE * file = fopen(getenv("LOST_WHEN"), "r");
        if (!file) {
            return 0;
        }
        if (fscanf(file, "%d", &left) != 1) {
            left = 0;
        }
        fclose(file);
    } else if (left > 0) {
        left -= 1;
    }
    if (left == 0) {
        next_idle(device_now);
    }
    return left == 0;
}

static int is_lost(void) {
    pthread_mutex_lock(&one);
    int now = lost();
    pthread_mutex_unlock(&one);
    return now;
}

static int32_t submit(void * q, uint32_t n, const void * s, uint64_t fence) {
    pthread_mutex_lock(&one);
    int32_t result = lost() ? DEVICE_LOST : next_submit(q, n, s, fence);
    pthread_mutex_unlock(&one);
    return result;
}
static int32_t wait_fences(void * d, uint32_t n, const uint64_t * f, uint32_t all, uint64_t ns) {
    return is_lost() ? DEVICE_LOST : next_wait(d, n, f, all, ns);
}
static int32_t status(void * d, uint64_t f) { return is_lost() ? DEVICE_LOST : next_status(d, f); }
static int32_t queue_idle(void * q) { return is_lost() ? DEVICE_LOST : next_queue(q); }
static int32_t idle(void * d) { return is_lost() ? DEVICE_LOST : next_idle(d); }

static any device_function(void * device, const char * name) {
    any found = next_device(device, name);
    device_now = device;
#define INSTEAD(is, to, kept)                                                                                          \
    if (found && strcmp(name, is) == 0) {                                                                              \
        *(any *)&kept = found;                                                                                         \
        return (any)to;                                                                                                \
    }
    INSTEAD("vkQueueSubmit", submit, next_submit)
    INSTEAD("vkWaitForFences", wait_fences, next_wait)
    INSTEAD("vkGetFenceStatus", status, next_status)
    INSTEAD("vkQueueWaitIdle", queue_idle, next_queue)
    INSTEAD("vkDeviceWaitIdle", idle, next_idle)
    return found;
}

static void * driver(void) {
    static void * opened;
    if (!opened) {
        opened = dlopen(getenv("LOST_DRIVER"), RTLD_NOW | RTLD_LOCAL);
    }
    return opened;
}

any vk_icdGetInstanceProcAddr(void * instance, const char * name) {
    any found = ((lookup)dlsym(driver(), "vk_icdGetInstanceProcAddr"))(instance, name);
    if (found && strcmp(name, "vkGetDeviceProcAddr") == 0) {
        next_device = (lookup)found;
        return (any)device_function;
    }
    return found;
}

any vk_icdGetPhysicalDeviceProcAddr(void * instance, const char * name) {
    return ((lookup)dlsym(driver(), "vk_icdGetPhysicalDeviceProcAddr"))(instance, name);
}

int32_t vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t * version) {
    return ((int32_t (*)(uint32_t *))dlsym(driver(), "vk_icdNegotiateLoaderICDInterfaceVersion"))(version);
}
