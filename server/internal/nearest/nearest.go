// Package nearest corrects misspelled names.
package nearest

// Of returns the name that is most like a misspelled one, or nothing. It does not search for long names, or among many names.
func Of(wrong string, names []string) string {
	const longest, most = 40, 100
	if len(wrong) > longest || len(names) > most {
		return ""
	}
	best, least := "", 1+len(wrong)/3
	for _, name := range names {
		if len(name) > longest {
			continue
		}
		if d := distance(wrong, name); d > 0 && d <= least {
			best, least = name, d-1 // the first of equals
		}
	}
	return best
}

// distance returns the number of bytes to insert, remove or replace to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
