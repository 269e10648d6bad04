#include "driver_types.h"  // all that nccl.h needs of it
