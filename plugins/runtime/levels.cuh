// Kernel parameters that are repeated for each of LEVELS pyramid levels.
#pragma once

#if LEVELS == 1
#define EACH_LEVEL(PARAMETER) PARAMETER(0)
#elif LEVELS == 2
#define EACH_LEVEL(PARAMETER) PARAMETER(0), PARAMETER(1)
#elif LEVELS == 3
#define EACH_LEVEL(PARAMETER) PARAMETER(0), PARAMETER(1), PARAMETER(2)
#elif LEVELS == 4
#define EACH_LEVEL(PARAMETER) PARAMETER(0), PARAMETER(1), PARAMETER(2), PARAMETER(3)
#elif LEVELS == 5
#define EACH_LEVEL(PARAMETER) PARAMETER(0), PARAMETER(1), PARAMETER(2), PARAMETER(3), PARAMETER(4)
#else
#error "a pyramid has one to five levels"
#endif
