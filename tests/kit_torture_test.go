package tests

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A torture test takes a number of steps in make test. In make torture it has the machine to itself, takes as many at least, and
// goes on for RATELIMIT_TORTURE_MINUTES. Its name starts with TestTorture_.
//
//	func TestTorture_Crash(t *testing.T) {
//		run := torture(t, 4)
//		crashes := 0
//		for ; run.goesOn(); crashes++ {
//			…
//			run.progress("%d crashes", crashes)
//		}
//		run.figure("crashes survived", crashes, "")
//	}
type tortureRun struct {
	t       *testing.T
	steps   int64
	taken   atomic.Int64
	budget  time.Duration // 0 in make test
	started time.Time

	mu   sync.Mutex
	said time.Time
}

// torture begins a test that takes so many steps in make test.
func torture(t *testing.T, steps int64) *tortureRun {
	run := &tortureRun{t: t, steps: steps, said: time.Now()}
	if s := os.Getenv("RATELIMIT_TORTURE_MINUTES"); s != "" {
		minutes, err := strconv.ParseFloat(s, 64)
		require.NoError(t, err, "RATELIMIT_TORTURE_MINUTES")
		run.budget = time.Duration(minutes * float64(time.Minute))
	} else {
		t.Parallel()
	}
	run.started = time.Now()
	return run
}

// goesOn reports, before each step and from any goroutine, whether there is another.
func (r *tortureRun) goesOn() bool {
	return r.taken.Add(1) <= r.steps || time.Since(r.started) < r.budget
}

// check has rapid draw a sequence for each step.
func (r *tortureRun) check(sequence func(t *rapid.T)) {
	failing := false // rapid repeats the sequence that has failed
	for ended := false; !ended; {
		rapid.Check(rapidTest{r.t}, func(t *rapid.T) {
			ended = ended || !failing && !r.goesOn()
			if ended {
				return
			}
			failing = true
			sequence(t)
			failing = false
		})
	}
}

// progress logs at most every few seconds, from any goroutine.
func (r *tortureRun) progress(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.said) < 5*time.Second {
		return
	}
	r.said = time.Now()
	r.t.Logf("%v: %s", time.Since(r.started).Round(time.Second), fmt.Sprintf(format, args...))
}

// figure adds a line to the table that ends the run.
func (r *tortureRun) figure(name string, value any, unit string) {
	figures.mu.Lock()
	defer figures.mu.Unlock()
	figures.lines = append(figures.lines, fmt.Sprintf("%s\t%s\t%v\t%s", r.t.Name(), name, value, unit))
}

// figures adds a line for each name and the number that follows it.
func (r *tortureRun) figures(pairs ...any) {
	for pair := range slices.Chunk(pairs, 2) {
		r.figure(fmt.Sprint(pair[0]), pair[1], "")
	}
}

var figures struct {
	mu    sync.Mutex
	lines []string
}

// A tortured M seeds rapid, and prints the figures after its tests.
type tortured struct{ *testing.M }

func (m tortured) Run() int {
	_ = flag.Set("rapid.nofailfile", "true") // the seed repeats a failure, and no later run does
	if seed := os.Getenv(seedVariable); seed != "" {
		_ = flag.Set("rapid.seed", seed)
	}
	code := m.M.Run()
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, line := range figures.lines {
		fmt.Fprintln(table, line)
	}
	_ = table.Flush() // a figure that cannot be shown fails no test
	return code
}

// seedVariable has the seed of a random run that is to be repeated.
const seedVariable = "RATELIMIT_TEST_SEED"

// testSeed is what RATELIMIT_TEST_SEED gives, or else a random number. If the test fails, it ends with the command that repeats it.
func testSeed(t testing.TB) uint64 {
	t.Helper()
	seed := firstSeed(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(repeats(t, seed))
		}
	})
	return seed
}

// firstSeed is testSeed for a test that has a seed for each step: this one, and then those that follow it. It names the one that fails.
func firstSeed(t testing.TB) uint64 {
	s := os.Getenv(seedVariable)
	if s == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(s, 10, 64)
	require.NoError(t, err, seedVariable)
	return seed
}

// repeats is the command that repeats a random run alone.
func repeats(t testing.TB, seed uint64) string {
	return fmt.Sprintf("%s=%d go test ./tests -run '^%s$' -count=1", seedVariable, seed, strings.ReplaceAll(t.Name(), "/", "$/^"))
}

// A rapidTest has rapid name the seed as other tests do, and leaves out its line about every hundred sequences.
type rapidTest struct{ *testing.T }

var rapidSeed = regexp.MustCompile(`-rapid\.seed=(\d+)`)

func (r rapidTest) Logf(format string, args ...any) {
	if !strings.HasPrefix(format, "[rapid] OK") {
		r.T.Logf(format, args...)
	}
}

func (r rapidTest) Errorf(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if found := rapidSeed.FindStringSubmatch(text); found != nil {
		seed, _ := strconv.ParseUint(found[1], 10, 64)
		text += "\n" + repeats(r, seed)
	}
	r.T.Error(text)
}
