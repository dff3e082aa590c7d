package acquire

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// lateral is the statement of docs/spending.md that calls a function about one bucket for many. Its parameters are the keys and at_most.
func lateral(t testing.TB) string {
	page := string(kit.NoError(os.ReadFile("../../docs/spending.md"))(t))
	statement := regexp.MustCompile(`(?s)=> (select a\.key, u\.taken.*?);\n`).FindStringSubmatch(page)
	require.NotNil(t, statement)
	return regexp.MustCompile(`'\{[^}]*\}'`).ReplaceAllStringFunc(statement[1], func(string) string { return "$%d" })
}

func acquireLateral(t testing.TB, q kit.RowsQuerier, keys []string, atMost []int64) (map[string]int64, error) {
	rows, err := q.Query(context.Background(), fmt.Sprintf(lateral(t), 1, 2), keys, atMost)
	if err != nil {
		return nil, err
	}
	taken := map[string]int64{}
	var key string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&key, &n}, func() error { taken[key] += n; return nil })
	return taken, err
}

// Callers take the same buckets in other orders, beside calls that take all of several: nobody deadlocks, and what was taken is what is gone.
func TestLateral_NeverDeadlocksAndNeverTakesMore(t *testing.T) {
	const callers, batches, buckets, capacity = 8, 25, 20, 600
	db := kit.ParallelDB(t)
	db.DefinePolicy("batch", capacity, 1, 1000*time.Hour)
	db.Warm(callers)
	taken := make([]int64, callers)
	kit.Crowd(t, callers, func(caller int) error {
		for batch := range batches {
			var keys []string
			var atMost []int64
			for i := range buckets {
				keys, atMost = append(keys, fmt.Sprint(batch/20, "/", i)), append(atMost, int64(1+rand.IntN(20)))
			}
			rand.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
			if caller%3 == 0 {
				d, err := kit.Decide(db.Pool, "ratelimit_acquire_all(array_fill(text 'batch', array[cardinality($1::text[])]), $1)", keys)
				if err != nil {
					return err
				} else if d.Allowed {
					taken[caller] += buckets
				}
				continue
			}
			got, err := acquireLateral(t, db.Pool, keys, atMost)
			if err != nil {
				return err
			}
			for _, n := range got {
				taken[caller] += n
			}
		}
		return nil
	})
	var sum int64
	for _, n := range taken {
		sum += n
	}
	require.Equal(t, sum, db.Number("select sum($1 - level / 1000000) from ratelimit.buckets", capacity))
	require.Zero(t, db.Number("select count(*) from ratelimit.buckets where level < 0"))
}

func TestLateral_AnErrorFailsTheStatementAndTakesNothing(t *testing.T) {
	db := kit.ParallelDB(t).Policy("batch", 10, 1, kit.ADay)
	keys := []string{"c", "b", "a"}
	for _, bad := range []string{"", strings.Repeat("x", 513)} {
		kit.RequireState(t, "22023", kit.ErrorOf(acquireLateral(t, db.Pool, append(keys, bad), []int64{1, 1, 1, 1})))
	}
	require.Zero(t, db.Number("select count(*) from ratelimit.buckets"))
	require.Equal(t, map[string]int64{"a": 3, "b": 10, "c": 1}, kit.NoError(acquireLateral(t, db.Pool, keys, []int64{1, 20, 3}))(t))
}
