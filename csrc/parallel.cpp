// Threads are those of the OpenMP runtime that PyTorch uses, GCC's libgomp: two runtimes in a process would each keep
// threads of their own that wait by spinning, on the same cores. GCC emits calls of libgomp for its pragmas. Clang emits
// calls of LLVM's runtime, which would be the second one; there libgomp's own entry points are called instead.
#include "parallel.h"

#if defined(KVIST_LIBGOMP_DIRECT)
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}
#elif defined(_OPENMP)
#include <omp.h>
#endif

namespace kvist {

#if defined(KVIST_LIBGOMP_DIRECT)

namespace {

struct Job {
    PartFunction function;
    void* context;
};

void run_part(void* data) {
    const Job* job = static_cast<const Job*>(data);
    job->function(job->context, omp_get_thread_num(), omp_get_num_threads());
}

}  // namespace

void run_parallel(int num_threads, PartFunction function, void* context) {
    Job job{function, context};
    GOMP_parallel(run_part, &job, static_cast<unsigned>(num_threads), 0);
}

#elif defined(_OPENMP)

void run_parallel(int num_threads, PartFunction function, void* context) {
#pragma omp parallel num_threads(num_threads)
    function(context, omp_get_thread_num(), omp_get_num_threads());
}

#else

void run_parallel(int, PartFunction function, void* context) { function(context, 0, 1); }

#endif

}  // namespace kvist
