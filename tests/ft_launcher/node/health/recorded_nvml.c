/* Stands in for the driver's library where there is no GPU: answers nvidia-ml-py with recorded readings.
 *
 * $RECORDED_NVML names a text file: the first line is what nvmlInit returns, then one line per GPU:
 *   uuid name open action remap_pending remap_failed retire_pending uncorrected links
 * `open` is what opening the GPU returns, or a path that is listed before it is opened (one that hangs, for a wedged
 * driver); a number of -1 is "not supported"; links is a word of 0 and 1, one letter per link.
 * $RECORDED_NVML.processes, where there is one, has a line with GPU and pid for each process that uses a GPU.
 * $RECORDED_NVML.memory, where there is one, holds the MiB in use of each GPU, read anew at each question.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char uuid[96], name[96], open[512], links[64];
    int action, remap_pending, remap_failed, retire_pending, uncorrected;
} Gpu;

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type, result;
    union { double d; unsigned u; unsigned long long ull; } value;
} Field;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

static Gpu gpus[16];
static int count;

int nvmlInitWithFlags(unsigned flags) {
    FILE *file = fopen(getenv("RECORDED_NVML"), "r");
    int result = 999;
    if (!file || fscanf(file, "%d", &result) != 1) return 999;
    for (Gpu *g = gpus; fscanf(file, "%95s %95s %511s %d %d %d %d %d %63s", g->uuid, g->name, g->open, &g->action,
                               &g->remap_pending, &g->remap_failed, &g->retire_pending, &g->uncorrected,
                               g->links) == 9; g++)
        count++;
    fclose(file);
    return result;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int result) { return "recorded error"; }

int nvmlDeviceGetCount_v2(unsigned *found) { return *found = count, SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
    *gpu = &gpus[index];
    if ((*gpu)->open[0] == '/') return opendir((*gpu)->open) ? SUCCESS : 999;
    return atoi((*gpu)->open);
}

int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned size) {
    if (!strcmp(gpu->uuid, "lost")) return 15;
    return strncpy(text, gpu->uuid, size), SUCCESS;
}

int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned size) { return strncpy(text, gpu->name, size), SUCCESS; }

int nvmlDeviceGetMemoryInfo(Gpu *gpu, unsigned long long *memory) {
    char path[4096];
    snprintf(path, sizeof path, "%s.memory", getenv("RECORDED_NVML"));
    FILE *file = fopen(path, "r");
    long long mib = -1;
    for (Gpu *g = gpus; file && g <= gpu && fscanf(file, "%lld", &mib) == 1; g++);
    if (file) fclose(file);
    memory[0] = 80ULL << 30;
    memory[2] = (unsigned long long)mib << 20;
    memory[1] = memory[0] - memory[2];
    return mib < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *n, Process *processes) {
    char path[4096];
    snprintf(path, sizeof path, "%s.processes", getenv("RECORDED_NVML"));
    FILE *file = fopen(path, "r");
    if (!file) return NOT_SUPPORTED;
    unsigned number, pid, found = 0;
    while (fscanf(file, "%u %u", &number, &pid) == 2)
        if (&gpus[number] == gpu && found++ < *n) processes[found - 1].pid = pid;
    fclose(file);
    int fits = found <= *n;
    return *n = found, fits ? SUCCESS : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetFieldValues(Gpu *gpu, int n, Field *fields) {
    for (int i = 0; i < n; i++) {
        fields[i].result = fields[i].field == 230 && gpu->action >= 0 ? SUCCESS : NOT_SUPPORTED;
        fields[i].value.u = gpu->action;
    }
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                              unsigned *failed) {
    *correctable = *uncorrectable = 0;
    *pending = gpu->remap_pending;
    *failed = gpu->remap_failed;
    return gpu->remap_failed < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(Gpu *gpu, unsigned *pending) {
    return *pending = gpu->retire_pending, gpu->retire_pending < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Gpu *gpu, int error, int counter, unsigned long long *errors) {
    return *errors = gpu->uncorrected, gpu->uncorrected < 0 || error != 1 || counter != 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetNvLinkState(Gpu *gpu, unsigned link, unsigned *active) {
    if (link >= strlen(gpu->links) || gpu->links[link] == '-') return NOT_SUPPORTED;
    return *active = gpu->links[link] == '1', SUCCESS;
}
