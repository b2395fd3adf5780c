/* What NVIDIA's driver answers to a process, as libnvidia-ml.so.1 (NVML).

   It reads its machine from the file that NVIDIA_MACHINE names, anew for each question, so that a
   GPU can be lost while processes run. A line is "key value"; "!15" as a value is NVML's error of
   that number. `nvidia_driver.py` writes the file and builds this. */

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_LIBRARY = 12 };
enum { ROOM = 4096 };
typedef void *Device; /* 256 * (GPU + 1), and the number of its instance + 1 */

/* The value of a key: 0, or the error that is there in its place. */
static int ask(char *value, const char *format, ...) {
  char key[128], line[ROOM];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(key, sizeof key, format, arguments);
  va_end(arguments);
  const char *path = getenv("NVIDIA_MACHINE");
  FILE *file = path ? fopen(path, "r") : NULL;
  if (!file) return NO_LIBRARY;
  int answer = NOT_SUPPORTED;
  while (answer == NOT_SUPPORTED && fgets(line, sizeof line, file)) {
    line[strcspn(line, "\n")] = 0;
    char *space = strchr(line, ' ');
    if (!space) continue;
    *space = 0;
    if (strcmp(line, key)) continue;
    answer = space[1] == '!' ? atoi(space + 2) : OK;
    strcpy(value, space + 1);
  }
  fclose(file);
  return answer;
}

static int ask_of(Device device, const char *what, char *value) {
  int gpu = (int)((intptr_t)device >> 8) - 1, instance = (int)((intptr_t)device & 255) - 1;
  int answer = ask(value, "gpu.%d", gpu); /* an error of the whole card */
  if (answer != NOT_SUPPORTED) return answer;
  if (instance < 0) return ask(value, "gpu.%d.%s", gpu, what);
  return ask(value, "gpu.%d.mig.%d.%s", gpu, instance, what);
}

static int number(Device device, const char *what, unsigned *found) {
  char value[ROOM];
  int answer = ask_of(device, what, value);
  if (answer == OK) *found = (unsigned)strtoul(value, NULL, 10);
  return answer;
}

static int text(Device device, const char *what, char *found, unsigned room) {
  char value[ROOM];
  int answer = ask_of(device, what, value);
  if (answer == OK) snprintf(found, room, "%s", value);
  return answer;
}

/* ---- NVML --------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags) {
  char value[ROOM];
  (void)flags;
  int answer = ask(value, "init");
  return answer == NOT_SUPPORTED ? OK : answer;
}

const char *nvmlErrorString(int error) {
  (void)error;
  return "an error without a name";
}

int nvmlSystemGetDriverVersion(char *found, unsigned room) {
  char value[ROOM];
  int answer = ask(value, "driver");
  if (answer == OK) snprintf(found, room, "%s", value);
  return answer;
}

int nvmlDeviceGetCount_v2(unsigned *found) {
  char value[ROOM];
  int answer = ask(value, "count");
  if (answer == OK) *found = (unsigned)atoi(value);
  return answer;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *found) {
  char value[ROOM];
  *found = (Device)(intptr_t)((index + 1) << 8);
  int answer = ask_of(*found, "handle", value); /* "no permission", say */
  return answer == NOT_SUPPORTED ? OK : answer;
}

int nvmlDeviceGetUUID(Device device, char *found, unsigned room) {
  return text(device, "uuid", found, room);
}

int nvmlDeviceGetName(Device device, char *found, unsigned room) {
  return text(device, "name", found, room);
}

int nvmlDeviceGetMigMode(Device device, unsigned *now, unsigned *later) {
  int answer = number(device, "mig_mode", now);
  if (answer == OK) *later = *now;
  return answer;
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *found) {
  return number(device, "mig_max", found);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device parent, unsigned index, Device *found) {
  char value[ROOM];
  *found = (Device)((intptr_t)parent + index + 1);
  return ask_of(*found, "uuid", value) == OK ? OK : NOT_FOUND; /* a gap */
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *found) {
  unsigned count = 0;
  char value[ROOM];
  int answer = nvmlDeviceGetCount_v2(&count);
  if (answer != OK) return answer;
  for (intptr_t gpu = 0; gpu < count; gpu++)
    for (intptr_t instance = -1; instance < 8; instance++) {
      *found = (Device)((gpu + 1) << 8 | (instance + 1));
      if (ask_of(*found, "uuid", value) == OK && !strcmp(uuid, value)) return OK;
    }
  return NOT_FOUND;
}

typedef struct { unsigned long long total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device device, Memory *found) {
  char value[ROOM];
  int answer = ask_of(device, "memory", value); /* "used total" */
  if (answer != OK) return answer;
  sscanf(value, "%llu %llu", &found->used, &found->total);
  found->free = found->total - found->used;
  return OK;
}

typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(Device device, Utilization *found) {
  found->memory = 0;
  return number(device, "utilization", &found->gpu);
}

int nvmlDeviceGetTemperature(Device device, int sensor, unsigned *found) {
  (void)sensor;
  return number(device, "temperature", found);
}

int nvmlDeviceGetComputeMode(Device device, unsigned *found) {
  return number(device, "compute_mode", found);
}

int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
  char value[ROOM];
  int answer = ask_of(device, "capability", value);
  if (answer == OK) sscanf(value, "%d.%d", major, minor);
  return answer;
}

int nvmlDeviceGetCpuAffinity(Device device, unsigned num_words, unsigned long *mask) {
  char value[ROOM];
  int answer = ask_of(device, "cpus", value); /* "0 1 2 ..." */
  if (answer != OK) return answer;
  memset(mask, 0, num_words * sizeof *mask);
  for (char *at = strtok(value, " "); at; at = strtok(NULL, " ")) {
    unsigned cpu = (unsigned)atoi(at);
    if (cpu / 64 < num_words) mask[cpu / 64] |= 1ul << cpu % 64;
  }
  return OK;
}

typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} Process;

/* "4711:61203283968 4712:-", of which the second one's memory is hidden. */
static int processes(Device device, const char *kind, unsigned *count, Process *found) {
  char value[ROOM];
  int answer = ask_of(device, kind, value);
  if (answer != OK) return answer;
  unsigned room = *count;
  *count = 0;
  for (char *at = strtok(value, " "); at; at = strtok(NULL, " ")) {
    char *used = strchr(at, ':') + 1;
    if (found && *count < room) {
      found[*count].pid = (unsigned)strtoul(at, NULL, 10);
      found[*count].used = *used == '-' ? ~0ull : strtoull(used, NULL, 10);
    }
    ++*count;
  }
  return *count > room ? TOO_SMALL : OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, Process *found) {
  return processes(device, "compute", count, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device device, unsigned *count, Process *found) {
  return processes(device, "graphics", count, found);
}
