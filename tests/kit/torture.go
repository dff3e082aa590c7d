package kit

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"
)

// A torture test takes a number of steps in make test. In make torture it has the machine to itself, takes as many at least, and
// goes on for RATELIMIT_TORTURE_MINUTES. Its name starts with TestTorture_.
//
//	func TestTorture_CrashLosesNoGrant(t *testing.T) {
//		run := kit.Torture(t, 4)
//		crashes := 0
//		for ; run.GoesOn(); crashes++ {
//			…
//			run.Progress("%d crashes", crashes)
//		}
//		run.Figure("crashes survived", crashes, "")
//	}
type TortureRun struct {
	T       *testing.T
	Steps   int64
	taken   atomic.Int64
	Budget  time.Duration // 0 in make test
	Started time.Time

	Mu   sync.Mutex
	said time.Time
}

// Torture begins a test that takes so many steps in make test.
func Torture(t *testing.T, steps int64) *TortureRun {
	run := &TortureRun{T: t, Steps: steps, said: time.Now()}
	if s := os.Getenv("RATELIMIT_TORTURE_MINUTES"); s != "" {
		minutes, err := strconv.ParseFloat(s, 64)
		require.NoError(t, err, "RATELIMIT_TORTURE_MINUTES")
		run.Budget = time.Duration(minutes * float64(time.Minute))
	} else {
		t.Parallel()
	}
	run.Started = time.Now()
	return run
}

// GoesOn reports, before each step and from any goroutine, whether there is another.
func (r *TortureRun) GoesOn() bool {
	return r.taken.Add(1) <= r.Steps || time.Since(r.Started) < r.Budget
}

// Progress logs at most every few seconds, from any goroutine.
func (r *TortureRun) Progress(format string, args ...any) {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if time.Since(r.said) < 5*time.Second {
		return
	}
	r.said = time.Now()
	r.T.Logf("%v: %s", time.Since(r.Started).Round(time.Second), fmt.Sprintf(format, args...))
}

// Figure adds a line to the table that ends the run.
func (r *TortureRun) Figure(name string, value any, unit string) {
	figures.Mu.Lock()
	defer figures.Mu.Unlock()
	figures.Lines = append(figures.Lines, fmt.Sprintf("%s\t%s\t%v\t%s", r.T.Name(), name, value, unit))
}

// Counts adds a line for each name and its count.
func (r *TortureRun) Counts(counts map[string]int) {
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		r.Figure(name, counts[name], "")
	}
}

// Figures adds a line for each name and the number that follows it.
func (r *TortureRun) Figures(pairs ...any) {
	for pair := range slices.Chunk(pairs, 2) {
		r.Figure(fmt.Sprint(pair[0]), pair[1], "")
	}
}

var figures struct {
	Mu    sync.Mutex
	Lines []string
}

// MWithFigures prints figures after the tests.
type MWithFigures struct{ *testing.M }

func (m MWithFigures) Run() int {
	code := m.M.Run()
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, line := range figures.Lines {
		fmt.Fprintln(table, line)
	}
	_ = table.Flush() // a figure that cannot be shown fails no test
	return code
}

// seedVariable has the seed of a random run that is to be repeated.
const seedVariable = "RATELIMIT_TEST_SEED"

// TestSeed is what RATELIMIT_TEST_SEED gives, or else a random number. If the test fails, it ends with the command that repeats it.
func TestSeed(t testing.TB) uint64 {
	t.Helper()
	seed := FirstSeed(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(Repeats(t, seed))
		}
	})
	return seed
}

// FirstSeed is TestSeed for a test that has a seed for each step: this one, and then those that follow it. It names the one that fails.
func FirstSeed(t testing.TB) uint64 {
	s := os.Getenv(seedVariable)
	if s == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(s, 10, 64)
	require.NoError(t, err, seedVariable)
	return seed
}

// Repeats is the command that repeats a random run alone.
func Repeats(t testing.TB, seed uint64) string {
	dir, _ := os.Getwd()
	return fmt.Sprintf("%s=%d go test ./tests/%s -run '^%s$' -count=1", seedVariable, seed, filepath.Base(dir), strings.ReplaceAll(t.Name(), "/", "$/^"))
}
