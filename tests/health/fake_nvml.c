/*
 * A library that speaks NVML's ABI (NVIDIA's "NVML API Reference Guide"), so that the real pynvml can be tested where
 * there is no GPU. What it answers stands in the folder named by FAKE_NVML:
 *
 *   scenario   lines "key value", read again whenever the file is replaced. Keys:
 *                devices N                how many GPUs there are
 *                init.error CODE          what nvmlInit fails with
 *                gpuI.NAME VALUE          an answer of GPU I; the names stand beside the functions below
 *                gpuI.error CODE          all functions fail for GPU I
 *                gpuI.FUNCTION CODE       that function fails for GPU I
 *                FUNCTION.hang 1          that function does not return while this stands here
 *   events     a FIFO with lines "GPU TYPE DATA", one for each event
 *
 * With -DOLD_DRIVER, functions that came with newer drivers are missing.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
};
enum { MAX_GPUS = 16, MAX_KEYS = 512, MAX_LINKS = 18 };

typedef struct { int index; } Device;
typedef struct { unsigned long long types[MAX_GPUS]; } EventSet;

typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} EventData;

typedef struct {
    char bus_legacy[16];
    unsigned int domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned int pid;
    unsigned long long used_bytes;
    unsigned int gpu_instance, compute_instance;
} ProcessInfo;

typedef struct { unsigned long long total, free, used; } Memory;

typedef struct {
    unsigned int field, scope;
    long long timestamp, latency_us;
    unsigned int value_type, result;
    unsigned long long value;
} FieldValue;

typedef struct {
    unsigned int version;
    unsigned long long counts[11];
    unsigned int is_threshold_exceeded;
} SramStatus;

static struct { char key[80]; long long value; } table[MAX_KEYS];
static int table_size, users, events_fd = -1;
static struct stat seen;
static char folder[4000];
static Device devices[MAX_GPUS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void read_scenario(void) {
    char path[4100];
    struct stat now;
    snprintf(path, sizeof path, "%s/scenario", folder);
    if (stat(path, &now) != 0 || (now.st_ino == seen.st_ino && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    table_size = 0;
    while (table_size < MAX_KEYS &&
           fscanf(file, "%79s %lld", table[table_size].key, &table[table_size].value) == 2)
        table_size++;
    fclose(file);
    seen = now;
}

static long long lookup(const char *key, long long otherwise) {
    long long value = otherwise;
    pthread_mutex_lock(&lock);
    read_scenario();
    for (int i = 0; i < table_size; i++)
        if (strcmp(table[i].key, key) == 0) value = table[i].value;
    pthread_mutex_unlock(&lock);
    return value;
}

static long long of_gpu(const Device *device, const char *name, long long otherwise) {
    char key[80];
    snprintf(key, sizeof key, "gpu%d.%s", device->index, name);
    return lookup(key, otherwise);
}

static void hang(const char *function) {
    char key[80];
    const struct timespec moment = {0, 2000000};
    snprintf(key, sizeof key, "%s.hang", function);
    while (lookup(key, 0)) nanosleep(&moment, NULL);
}

static int enter(const Device *device, const char *function) {
    if (!users) return UNINITIALIZED;
    hang(function);
    long long code = of_gpu(device, "error", SUCCESS);
    return (int)(code ? code : of_gpu(device, function, SUCCESS));
}

#define ENTER(device)                              \
    do {                                           \
        int failure = enter(device, __func__);     \
        if (failure) return failure;               \
    } while (0)

/* A function whose answer is one unsigned number. */
#define NUMBER(function, name, otherwise)                      \
    int function(Device *device, unsigned int *answer) {       \
        ENTER(device);                                         \
        *answer = (unsigned int)of_gpu(device, name, otherwise); \
        return SUCCESS;                                        \
    }

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    const char *name = getenv("FAKE_NVML");
    snprintf(folder, sizeof folder, "%s", name ? name : ".");
    hang(__func__);
    int failure = (int)lookup("init.error", SUCCESS);
    if (failure) return failure;
    if (events_fd < 0) {
        char path[4100];
        snprintf(path, sizeof path, "%s/events", folder);
        events_fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    }
    users++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

/* Only for tests: how often the library is in use. */
int fakeUsers(void) { return users; }

const char *nvmlErrorString(int code) {
    static char text[40];
    snprintf(text, sizeof text, "error %d of the fake", code);
    return text;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = (unsigned int)lookup("devices", 1);
    return users ? SUCCESS : UNINITIALIZED;
}

int nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device **device) {
    devices[index].index = (int)index;
    ENTER(&devices[index]);
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned int size) {
    ENTER(device);
    snprintf(text, size, "GPU-%04d0000-0000-4000-8000-00000000000%x", device->index, device->index);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned int size) {
    ENTER(device);
    snprintf(text, size, "NVIDIA Fake %lld", of_gpu(device, "model", 100));
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *info) {
    ENTER(device);
    int bus = (int)of_gpu(device, "bus", 16 + device->index);
    memset(info, 0, sizeof *info);
    info->bus = (unsigned int)bus;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", bus);
    return SUCCESS;
}

/* ecc_volatile, ecc_aggregate */
int nvmlDeviceGetTotalEccErrors(Device *device, int kind, int counter, unsigned long long *count) {
    ENTER(device);
    *count = kind == 0 ? 0 : (unsigned long long)of_gpu(device, counter == 0 ? "ecc_volatile" : "ecc_aggregate", 0);
    return SUCCESS;
}

/* pages_pending */
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "pages_pending", 0)
/* pcie_width, pcie_max_width, pcie_generation, pcie_max_generation */
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width", 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_generation", 5)
NUMBER(nvmlDeviceGetPerformanceState, "pstate", 0)

/* busy: percent */
int nvmlDeviceGetUtilizationRates(Device *device, unsigned int *rates) {
    ENTER(device);
    rates[0] = rates[1] = (unsigned int)of_gpu(device, "busy", 0);
    return SUCCESS;
}

/* celsius */
int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned int *celsius) {
    ENTER(device);
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = (unsigned int)of_gpu(device, "celsius", 35);
    return SUCCESS;
}

/* memory_total, memory_used: bytes */
int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    ENTER(device);
    memory->total = (unsigned long long)of_gpu(device, "memory_total", 80LL << 30);
    memory->used = (unsigned long long)of_gpu(device, "memory_used", 1LL << 30);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

/* clocks: reasons; 4 is a power cap, which is normal */
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    ENTER(device);
    *reasons = (unsigned long long)of_gpu(device, "clocks", 4);
    return SUCCESS;
}

/* links: how many there are; link_down: which of them is down, or -1 */
int nvmlDeviceGetNvLinkState(Device *device, unsigned int link, unsigned int *is_active) {
    ENTER(device);
    if (link >= MAX_LINKS) return INVALID_ARGUMENT;
    if (link >= (unsigned int)of_gpu(device, "links", MAX_LINKS)) return NOT_SUPPORTED;
    *is_active = (long long)link != of_gpu(device, "link_down", -1);
    return SUCCESS;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    ENTER(device);
    *reasons = (unsigned long long)of_gpu(device, "clocks", 4);
    return SUCCESS;
}

/* rows_pending, rows_failed */
int nvmlDeviceGetRemappedRows(Device *device, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *is_pending, unsigned int *has_failed) {
    ENTER(device);
    *corrected = *uncorrected = 0;
    *is_pending = (unsigned int)of_gpu(device, "rows_pending", 0);
    *has_failed = (unsigned int)of_gpu(device, "rows_failed", 0);
    return SUCCESS;
}

/* sram_exceeded */
int nvmlDeviceGetSramEccErrorStatus(Device *device, SramStatus *status) {
    ENTER(device);
    memset(status->counts, 0, sizeof status->counts);
    status->is_threshold_exceeded = (unsigned int)of_gpu(device, "sram_exceeded", 0);
    return SUCCESS;
}

/* field.ID or field.ID.SCOPE; one that is not there is not supported, but for the recovery action (230), which is 0 */
int nvmlDeviceGetFieldValues(Device *device, int count, FieldValue *values) {
    ENTER(device);
    for (int i = 0; i < count; i++) {
        char name[60];
        if (values[i].scope)
            snprintf(name, sizeof name, "field.%u.%u", values[i].field, values[i].scope);
        else
            snprintf(name, sizeof name, "field.%u", values[i].field);
        long long value = of_gpu(device, name, values[i].field == 230 ? 0 : -1);
        values[i].result = value < 0 ? NOT_SUPPORTED : SUCCESS;
        values[i].value_type = values[i].field == 230 ? 1 : 3;
        values[i].value = (unsigned long long)value;
    }
    return SUCCESS;
}

/* pid, and used: the bytes it holds, or -1 if that is not known */
static int processes(Device *device, unsigned int *count, ProcessInfo *infos, const char *name) {
    long long pid = of_gpu(device, name, 0);
    unsigned int room = *count;
    *count = pid ? 1 : 0;
    if (!pid) return SUCCESS;
    if (room < 1 || !infos) return INSUFFICIENT_SIZE;
    infos[0] = (ProcessInfo){(unsigned int)pid, (unsigned long long)of_gpu(device, "used", 1 << 30), 0, 0};
    return SUCCESS;
}

#define PROCESSES(function, name)                                                    \
    int function(Device *device, unsigned int *count, ProcessInfo *infos) {          \
        ENTER(device);                                                               \
        return processes(device, count, infos, name);                                \
    }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "pid")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps_pid")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics_pid")

/* events: the mask of what it supports */
int nvmlDeviceGetSupportedEventTypes(Device *device, unsigned long long *types) {
    ENTER(device);
    *types = (unsigned long long)of_gpu(device, "events", 0x1f);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    ENTER(device);
    set->types[device->index] |= types;
    return SUCCESS;
}

int nvmlEventSetCreate(EventSet **set) {
    *set = calloc(1, sizeof **set);
    return *set ? SUCCESS : 999;
}

int nvmlEventSetFree(EventSet *set) {
    free(set);
    return SUCCESS;
}

static int read_line(char *line, int size) {
    int length = 0;
    while (length < size - 1 && read(events_fd, line + length, 1) == 1)
        if (line[length++] == '\n') break;
    line[length] = 0;
    return length;
}

static long long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static int lost_in(const EventSet *set) {
    for (int i = 0; i < MAX_GPUS; i++)
        if (set->types[i] && of_gpu(&devices[i], "error", 0) == GPU_IS_LOST) return 1;
    return 0;
}

/* wait.error; instance: the GPU instance that an event is of. Pending events come before the news of a lost GPU. */
int nvmlEventSetWait_v2(EventSet *set, EventData *data, unsigned int timeout_ms) {
    const long long end_ms = now_ms() + timeout_ms;
    int failure = (int)lookup("wait.error", SUCCESS);
    if (failure) return failure;
    for (;;) {
        hang(__func__);
        struct pollfd events = {.fd = events_fd, .events = POLLIN};
        long long left_ms = end_ms - now_ms();
        if (poll(&events, 1, (int)(left_ms < 0 ? 0 : left_ms > 10 ? 10 : left_ms)) == 1) {
            char line[128];
            int gpu;
            unsigned long long type, number;
            if (read_line(line, sizeof line) && sscanf(line, "%d %llu %llu", &gpu, &type, &number) == 3 &&
                set->types[gpu] & type) {
                unsigned int instance = (unsigned int)of_gpu(&devices[gpu], "instance", 0xFFFFFFFF);
                *data = (EventData){&devices[gpu], type, number, instance, 0xFFFFFFFF};
                return SUCCESS;
            }
        } else if (lost_in(set)) {
            return GPU_IS_LOST;
        } else if (left_ms <= 0) {
            return TIMEOUT;
        }
    }
}
#endif
