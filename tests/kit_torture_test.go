package tests

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/stretchr/testify/require"
)

// A torture test goes on for as long as it is given: a few seconds beside the other tests in make test,
// RATELIMIT_TORTURE_MINUTES and the machine to itself in make torture. Its name starts with TestTorture_.
//
//	func TestTorture_Crash(t *testing.T) {
//		run := torture(t, 10*time.Second)
//		for crashes := 0; run.goesOn(); crashes++ {
//			…
//			run.progress("%d crashes", crashes)
//		}
//		run.figure("crashes survived", crashes, "")
//	}
type tortureRun struct {
	t       *testing.T
	budget  time.Duration
	started time.Time

	mu   sync.Mutex
	said time.Time
}

// torture begins a test whose share of make test is given.
func torture(t *testing.T, share time.Duration) *tortureRun {
	t.Helper()
	run := &tortureRun{t: t, budget: share, said: time.Now()}
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

func (r *tortureRun) goesOn() bool { return time.Since(r.started) < r.budget }

// goesOnUntil goes on after its time, too, until the run has met what it must meet; but not for longer than patient.
func (r *tortureRun) goesOnUntil(met bool, patient time.Duration) bool {
	return r.goesOn() || !met && time.Since(r.started) < patient
}

// progress logs at most every few seconds, from any goroutine.
func (r *tortureRun) progress(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.said) < 5*time.Second {
		return
	}
	r.said = time.Now()
	r.t.Logf("%v of %v: %s", time.Since(r.started).Round(time.Second), r.budget, fmt.Sprintf(format, args...))
}

// figure adds a line to the table that ends the run.
func (r *tortureRun) figure(name string, value any, unit string) {
	figures.mu.Lock()
	defer figures.mu.Unlock()
	figures.lines = append(figures.lines, fmt.Sprintf("%s\t%s\t%v\t%s", r.t.Name(), name, value, unit))
}

var figures struct {
	mu    sync.Mutex
	lines []string
}

// A tortured M prints the figures after its tests.
type tortured struct{ *testing.M }

func (m tortured) Run() int {
	code := m.M.Run()
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	for _, line := range figures.lines {
		fmt.Fprintln(table, line)
	}
	_ = table.Flush() // a figure that cannot be shown fails no test
	return code
}

// testSeed is what RATELIMIT_TEST_SEED gives, or else a random number.
func testSeed(t testing.TB) (seed uint64, given bool) {
	t.Helper()
	s := os.Getenv("RATELIMIT_TEST_SEED")
	if s == "" {
		return rand.Uint64(), false
	}
	seed, err := strconv.ParseUint(s, 10, 64)
	require.NoError(t, err, "RATELIMIT_TEST_SEED")
	return seed, true
}
