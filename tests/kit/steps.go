package kit

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A Step is a query at a time after T0, and the columns of its answer, separated by commas.
type Step = struct {
	At        time.Duration
	SQL, Want string
}

// RunSteps makes the calls of each rule one after the other, on durable and on ephemeral policies: what stands for (durable) in a query.
func RunSteps(t *testing.T, rules map[string][]Step) {
	for rule, steps := range rules {
		for _, durable := range []string{"true", "false"} {
			t.Run(rule+"/durable="+durable, func(t *testing.T) {
				db := ParallelDB(t).CleanUpAtOnce()
				for i, step := range steps {
					db.SetClock(T0.Add(step.At))
					sql := `select trim(both '()"' from r::text) from (` + strings.ReplaceAll(step.SQL, "(durable)", durable) + ") as r"
					require.Equal(t, []string{step.Want}, Column(t, db.DB, sql), "step %d: %s", i+1, step.SQL)
				}
			})
		}
	}
}
