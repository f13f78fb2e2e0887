/* coc_nvml.c - a model of the driver's sensor library, with the functions that amp_cuda.cu calls.  It has one GPU, at the
 * PCI address of the model's second one, with the values below.  A test loads it first, and dlopen then finds it by the
 * name inside it. */
#include <string.h>

/* What tests set and read, by dlsym. */
struct coc_nvml {
    int fail_init, fail_utilization, fail_temperature, fail_temperature_before, fail_power;    /* 1: that call fails */
    int open;                       /* calls of init less those of shutdown */
    int misused;                    /* 1: called while not open, or with a device or struct that is none */
};
extern struct coc_nvml coc_nvml;
struct coc_nvml coc_nvml;

struct nvml_utilization { unsigned gpu, memory; };
struct nvml_temperature { unsigned version; int sensor, celsius; };
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, UNKNOWN = 999 };

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device);
int nvmlDeviceGetUtilizationRates(void *device, struct nvml_utilization *out);
int nvmlDeviceGetTemperatureV(void *device, struct nvml_temperature *out);
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *out);
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts);

static char the_device;

static int begin(void *device, int fails) {
    if (coc_nvml.open > 0 && device == &the_device) return fails ? UNKNOWN : SUCCESS;
    coc_nvml.misused = 1;
    return coc_nvml.open > 0 ? INVALID_ARGUMENT : UNINITIALIZED;
}

int nvmlInit_v2(void) {
    if (coc_nvml.fail_init) return UNKNOWN;
    coc_nvml.open++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (coc_nvml.open == 0) coc_nvml.misused = 1;
    else coc_nvml.open--;
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **device) {
    if (strcmp(address, "0000:02:00.0") != 0) return NOT_FOUND;
    *device = &the_device;
    return begin(&the_device, 0);
}

int nvmlDeviceGetUtilizationRates(void *device, struct nvml_utilization *out) {
    int result = begin(device, coc_nvml.fail_utilization);
    if (result == SUCCESS) { out->gpu = 87; out->memory = 31; }
    return result;
}

int nvmlDeviceGetTemperatureV(void *device, struct nvml_temperature *out) {
    int result = begin(device, coc_nvml.fail_temperature);
    if (out->version != (1u << 24 | 12) || out->sensor != 0) { coc_nvml.misused = 1; return INVALID_ARGUMENT; }
    if (result == SUCCESS) out->celsius = 64;
    return result;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *out) {
    int result = begin(device, coc_nvml.fail_temperature_before);
    if (sensor != 0) { coc_nvml.misused = 1; return INVALID_ARGUMENT; }
    if (result == SUCCESS) *out = 65;
    return result;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    int result = begin(device, coc_nvml.fail_power);
    if (result == SUCCESS) *milliwatts = 512250;
    return result;
}
