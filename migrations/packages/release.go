package packages

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
)

// Release writes the files of a release: an archive of each package that is several files, the others as they are,
// and the checksums of all. The same files give the same bytes.
func Release(repository fs.FS) (Files, error) {
	s, err := open(repository)
	if err != nil {
		return nil, err
	}
	name := "pgratelimit-" + s.Newest().Version
	all := Files{}
	for _, format := range formats {
		files, err := format.of(s)
		if err != nil {
			return nil, err
		}
		if !format.archive {
			for file, text := range files {
				all[name+"-"+file] = text
			}
			continue
		}
		title := name + "-" + format.dir
		if format.dir == "extension" {
			title = name // as PGXN wants it
		}
		if all[title+".zip"], err = archive(title, files); err != nil {
			return nil, err
		}
	}
	var sums bytes.Buffer
	for _, file := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(all[file]), file)
	}
	all["SHA256SUMS"] = sums.Bytes()
	return all, nil
}

// archive makes a zip file with one directory.
func archive(dir string, files Files) ([]byte, error) {
	var zipped bytes.Buffer
	w := zip.NewWriter(&zipped)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		// Without a time of its own, each file has none.
		file, err := w.CreateHeader(&zip.FileHeader{Name: path.Join(dir, name), Method: zip.Deflate})
		if err == nil {
			_, err = file.Write(files[name])
		}
		if err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return zipped.Bytes(), err
}
